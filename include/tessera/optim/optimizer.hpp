/// What an optimizer is here: the state of one flat shard of parameters, and a fused pass that turns the
/// shard's gradients into new weights. It knows nothing of ranks, units or names: whoever owns the shard says
/// which of its elements decay and what the gradients must be multiplied by.
///
///     optim::adamw<exec::host, bf16> o(ex, n, {.weight_decay = 0.1}, decayed);
///     o.start_from(ex, weights);
///     o.step(ex, weights, gradients, {.step = 1, .learning_rate = 3e-4, .gradient_scale = 1.0 / tokens});
#ifndef TESSERA_OPTIM_OPTIMIZER_HPP
#define TESSERA_OPTIM_OPTIMIZER_HPP

#include <concepts>
#include <string_view>
#include <vector>

#include <tessera/core/memory.hpp>
#include <tessera/core/scalar.hpp>
#include <tessera/exec/space.hpp>
#include <tessera/layout/shard.hpp>

namespace tessera::inline TESSERA_ABI::optim {

/// What changes from update to update.
struct step_values {
  index_t step = 1;          ///< Number of this update, from 1: bias corrections depend on it.
  double learning_rate = 0;  ///< Of this update.
  double gradient_scale = 1; ///< Factor on every gradient: clipping / (token count * loss scale).
};

/// One array of an optimizer's state, by the name it has in checkpoints ("master", "exp_avg", ...).
template <memory_space Memory = host_memory>
struct state_array {
  std::string_view name;
  memory_span<float, Memory> values;
};

/// Semantics: the optimizer serves a shard of `elements()` elements. `start_from` takes the first weights (in
/// storage precision, or in fp32 where the initial values are known better). `step` updates all of them.
/// `state()` is everything a checkpoint needs besides the weights; after its arrays are overwritten with
/// saved ones, the run goes on with the same bits.
template <class O, class Ex, class T, class G>
concept optimizer = exec::space<Ex> && storage_scalar<T> && storage_scalar<G> &&
    std::constructible_from<O, Ex&, index_t, typename O::options_type, std::vector<layout::range>,
                            memory_account> &&
    requires(O& o, O const& c, Ex& ex, memory_span<T, typename Ex::memory> weights,
             memory_span<G const, typename Ex::memory> gradients,
             memory_span<float const, typename Ex::memory> values, step_values step) {
  { c.elements() } -> std::same_as<index_t>;
  { o.state() } -> std::same_as<std::vector<state_array<typename Ex::memory>>>;
  o.start_from(ex, memory_span<T const, typename Ex::memory>(weights));
  o.start_from(ex, values);
  o.step(ex, weights, gradients, step);
  // Bytes of state for each element, known without an object: what a memory plan adds up.
  { O::state_bytes(typename O::options_type{}) } -> std::same_as<index_t>;
};

} // namespace tessera::inline TESSERA_ABI::optim

#endif
