/// One pass over a flat shard that applies an element-wise update rule: what every optimizer here is made of.
/// A rule is a small functor that host and device share; it says how many fp32 state arrays it keeps and sees
/// one element at a time.
///
///     struct descent {
///       static constexpr int slots = 0;
///       float rate;
///       float operator()(float weight, float gradient, float) const { return weight - rate * gradient; }
///     };
///     flat_update(ex, flat_shard<float, float, 0>{.weights = w, .gradients = g}, descent{0.1f});
///
/// Cost: each array is read once and written once; nothing else is moved.
#ifndef TESSERA_OPTIM_FLAT_UPDATE_HPP
#define TESSERA_OPTIM_FLAT_UPDATE_HPP

#include <array>

#include <tessera/core/scalar.hpp>
#include <tessera/exec/space.hpp>
#include <tessera/layout/shard.hpp>

namespace tessera::inline TESSERA_ABI::optim {

/// The arrays of a shard, all of the same length, in one kind of memory.
template <storage_scalar T, storage_scalar G, int Slots, memory_space Memory = host_memory>
struct flat_shard {
  memory_span<T, Memory> weights;         ///< Written, rounded to T. Read where there is no master.
  memory_span<float, Memory> master = {}; ///< The weights in fp32; empty: `weights` are the only ones.
  memory_span<G const, Memory> gradients; ///< Read.
  std::array<memory_span<float, Memory>, static_cast<std::size_t>(Slots)> state = {}; ///< Read and written.
  /// In order, disjoint; elsewhere the decay is 0. Known to the host.
  std::span<layout::range const> decayed = {};
};

/// `rule(weight, gradient, decay, state&...)` updates the state and returns the new weight.
template <class Rule>
concept update_rule = (Rule::slots == 0 && std::is_invocable_r_v<float, Rule const&, float, float, float>) ||
                      (Rule::slots == 1 &&
                       std::is_invocable_r_v<float, Rule const&, float, float, float, float&>) ||
                      (Rule::slots == 2 &&
                       std::is_invocable_r_v<float, Rule const&, float, float, float, float&, float&>);

/// The implementation for one backend, `run(ex, shard, rule, decay, where)` and `copy(ex, out, in, where)`;
/// `host/flat_update.hpp` has the host's.
template <class Backend>
struct flat_update_on;

/// Applies `rule` to every element of the shard, with `decay` in the decayed ranges and 0 outside them. The
/// result does not depend on the number of threads.
/// Throws size_error where the arrays' lengths differ (E-optim-001) or a decayed range is out of order or
/// outside the shard (E-optim-002).
template <exec::space Ex, storage_scalar T, storage_scalar G, int Slots, update_rule Rule>
  requires(Slots == Rule::slots)
void flat_update(Ex& ex, flat_shard<T, G, Slots, typename Ex::memory> const& shard, Rule const& rule,
                 float decay = 0, site where = site::here()) {
  auto const n = shard.weights.size();
  auto fits = shard.gradients.size() == n && (shard.master.empty() || shard.master.size() == n);
  for (auto const& array : shard.state) fits = fits && array.size() == n;
  if (!fits)
    throw size_error("E-optim-001", where, "an update of ", n, " weights was given ", shard.gradients.size(),
                     " gradients, ", shard.master.size(), " master weights and ",
                     Slots == 0 ? 0 : shard.state.front().size(), " elements of state");
  index_t reached = 0;
  for (auto const& r : shard.decayed) {
    if (r.begin < reached || r.end < r.begin || r.end > static_cast<index_t>(n))
      throw size_error("E-optim-002", where, "decayed range [", r.begin, ", ", r.end,
                       ") is out of order or outside a shard of ", n, " elements");
    reached = r.end;
  }
  flat_update_on<typename Ex::backend>::run(ex, shard, rule, decay, where);
}

/// Widens storage to fp32 element by element: how a master copy starts.
template <exec::space Ex, span_in<typename Ex::memory> Values>
  requires storage_scalar<typename Values::value_type>
void flat_copy(Ex& ex, memory_span<float, typename Ex::memory> out, Values values,
               site where = site::here()) {
  memory_span<typename Values::value_type const, typename Ex::memory> const in = values;
  if (out.size() != in.size())
    throw size_error("E-optim-003", where, out.size(), " master weights cannot start from ", in.size(),
                     " values");
  flat_update_on<typename Ex::backend>::copy(ex, out, in, where);
}

} // namespace tessera::inline TESSERA_ABI::optim

#include <tessera/optim/host/flat_update.hpp>

#endif
