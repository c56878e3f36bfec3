/// AdamW, fused: one pass reads the gradient, updates both moments and the fp32 weight, applies decoupled
/// weight decay, and writes the weight in its storage type (Loshchilov and Hutter, "Decoupled weight decay
/// regularization", 2019; the update is the one of torch.optim.AdamW).
///
///     g = gradient_scale * gradient
///     m = beta1 m + (1 - beta1) g
///     v = beta2 v + (1 - beta2) g^2
///     w = w (1 - rate * decay) - rate * m / (1 - beta1^step) / (sqrt(v / (1 - beta2^step)) + epsilon)
///
///     optim::adamw<exec::host, bf16> o(ex, n, {.weight_decay = 0.1}, decayed);
///     o.start_from(ex, weights);
///     o.step(ex, weights, gradients, {.step = 1, .learning_rate = 3e-4, .gradient_scale = 1.0 / tokens});
///
/// Cost: 28 bytes an element with fp32 weights and gradients; 26 plus the gradient with 16-bit weights, whose
/// master is kept in fp32.
#ifndef TESSERA_OPTIM_ADAMW_HPP
#define TESSERA_OPTIM_ADAMW_HPP

#include <cmath>

#include <tessera/core/tensor.hpp>
#include <tessera/optim/detail/square_root.hpp>
#include <tessera/optim/flat_update.hpp>
#include <tessera/optim/optimizer.hpp>

namespace tessera::inline TESSERA_ABI::optim {

struct adamw_options {
  double beta1 = 0.9;
  double beta2 = 0.95;
  double epsilon = 1e-8;
  double weight_decay = 0.1;
};

/// The update of one element, with everything that is the same for all of them worked out beforehand.
struct adamw_rule {
  static constexpr int slots = 2;

  float gradient_scale, beta1, beta2, new_in_first, new_in_second, rate, inverse_root_correction, epsilon;

  adamw_rule(adamw_options const& options, step_values const& values)
      : gradient_scale(static_cast<float>(values.gradient_scale)), beta1(static_cast<float>(options.beta1)),
        beta2(static_cast<float>(options.beta2)), new_in_first(static_cast<float>(1 - options.beta1)),
        new_in_second(static_cast<float>(1 - options.beta2)),
        rate(static_cast<float>(values.learning_rate /
                                (1 - std::pow(options.beta1, static_cast<double>(values.step))))),
        inverse_root_correction(
            static_cast<float>(1 / std::sqrt(1 - std::pow(options.beta2, static_cast<double>(values.step))))),
        epsilon(static_cast<float>(options.epsilon)) {}

  /// `decay` is learning rate * weight decay, or 0.
  [[gnu::always_inline]] TESSERA_HOST_DEVICE float operator()(float weight, float gradient, float decay,
                                                              float& first, float& second) const noexcept {
    auto const g = gradient_scale * gradient;
    first = beta1 * first + new_in_first * g;
    second = beta2 * second + new_in_second * g * g;
    auto const deviation = detail::square_root(second) * inverse_root_correction + epsilon;
    return weight * (1.0f - decay) - rate * first / deviation;
  }
};

/// One AdamW update of the arrays that the caller holds. `master` may be empty. Throws size_error where the
/// lengths differ, config_error (E-optim-004, E-optim-007) where step is below 1 or a beta not in [0, 1).
template <exec::space Ex, span_in<typename Ex::memory> Weights, span_in<typename Ex::memory> Gradients>
  requires(storage_scalar<typename Weights::element_type>&& storage_scalar<typename Gradients::value_type>)
void adamw_update(Ex& ex, Weights weights, memory_span<float, typename Ex::memory> master,
                  memory_span<float, typename Ex::memory> first_moment,
                  memory_span<float, typename Ex::memory> second_moment, Gradients gradients,
                  adamw_options const& options, step_values const& values,
                  std::span<layout::range const> decayed, site where = site::here()) {
  if (values.step < 1)
    throw config_error("E-optim-004", where, "the number of an update is ", values.step,
                       "; the first is 1, as its bias correction needs");
  for (auto beta : {options.beta1, options.beta2})
    if (!(beta >= 0 && beta < 1))
      throw config_error("E-optim-007", where, "a decay of AdamW's moments is ", beta,
                         "; beta1 and beta2 are 0 or more and below 1");
  using shard =
      flat_shard<typename Weights::value_type, typename Gradients::value_type, 2, typename Ex::memory>;
  flat_update(ex,
              shard{.weights = weights,
                    .master = master,
                    .gradients = gradients,
                    .state = {first_moment, second_moment},
                    .decayed = decayed},
              adamw_rule(options, values), static_cast<float>(values.learning_rate * options.weight_decay),
              where);
}

/// The AdamW state of one flat shard: two fp32 moments, and an fp32 master where weights are 16-bit.
template <exec::space Ex, storage_scalar T>
class adamw {
public:
  using options_type = adamw_options;
  using memory = typename Ex::memory;
  static constexpr bool has_master = !std::same_as<T, float>;

  static constexpr index_t state_bytes(adamw_options const&) noexcept { return has_master ? 12 : 8; }

  /// `decayed`: the elements that weight decay acts on, in order and disjoint.
  adamw(Ex&, index_t elements, adamw_options options, std::vector<layout::range> decayed,
        memory_account account = {nullptr, memory_kind::optimizer_state}, site where = site::here())
      : elements_(elements), options_(options), decayed_(static_cast<std::vector<layout::range>&&>(decayed)),
        master_({has_master ? elements : 0}, account, where), first_moment_({elements}, account, where),
        second_moment_({elements}, account, where) {}

  index_t elements() const noexcept { return elements_; }
  adamw_options const& options() const noexcept { return options_; }

  /// Sets the master weights, from the weights as stored or from better known fp32 values. Without a master
  /// there is nothing to set.
  template <span_in<memory> Values>
    requires(std::same_as<typename Values::value_type, T> || std::same_as<typename Values::value_type, float>)
  void start_from(Ex& ex, Values values, site where = site::here()) {
    if constexpr (has_master) flat_copy(ex, master_.span(), values, where);
  }

  template <span_in<memory> Gradients>
    requires storage_scalar<typename Gradients::value_type>
  void step(Ex& ex, memory_span<T, memory> weights, Gradients gradients, step_values const& values,
            site where = site::here()) {
    adamw_update(ex, weights, master_.span(), first_moment_.span(), second_moment_.span(), gradients,
                 options_, values, std::span<layout::range const>(decayed_), where);
  }

  std::vector<state_array<memory>> state() {
    std::vector<state_array<memory>> arrays;
    if constexpr (has_master) arrays.push_back({"master", master_.span()});
    arrays.push_back({"exp_avg", first_moment_.span()});
    arrays.push_back({"exp_avg_sq", second_moment_.span()});
    return arrays;
  }

private:
  index_t elements_;
  adamw_options options_;
  std::vector<layout::range> decayed_;
  tensor<float, 1, memory> master_, first_moment_, second_moment_;
};

} // namespace tessera::inline TESSERA_ABI::optim

#endif
