/// Stochastic gradient descent with momentum, fused into one pass (the update of torch.optim.SGD: momentum as
/// a decaying sum of gradients, weight decay added to the gradient, Nesterov's look-ahead on request).
///
///     g = gradient_scale * gradient + decay * w       m = momentum m + g
///     w = w - rate * m       or, with nesterov,       w = w - rate * (g + momentum m)
///
///     optim::sgd<exec::host, float> o(ex, n, {.momentum = 0.9}, decayed);
///     o.step(ex, weights, gradients, {.step = 1, .learning_rate = 0.1});
///
/// Cost: 20 bytes an element with fp32 weights and gradients, 12 without momentum.
#ifndef TESSERA_OPTIM_SGD_HPP
#define TESSERA_OPTIM_SGD_HPP

#include <tessera/core/tensor.hpp>
#include <tessera/optim/flat_update.hpp>
#include <tessera/optim/optimizer.hpp>

namespace tessera::inline TESSERA_ABI::optim {

struct sgd_options {
  double momentum = 0.9; ///< 0: plain descent, without state.
  double weight_decay = 0;
  bool nesterov = false;
};

/// The update of one element with momentum.
struct sgd_rule {
  static constexpr int slots = 1;

  float gradient_scale, momentum, rate;
  float look_ahead; ///< 1 with Nesterov's momentum, else 0.

  sgd_rule(sgd_options const& options, step_values const& values)
      : gradient_scale(static_cast<float>(values.gradient_scale)),
        momentum(static_cast<float>(options.momentum)), rate(static_cast<float>(values.learning_rate)),
        look_ahead(options.nesterov ? 1.0f : 0.0f) {}

  [[gnu::always_inline]] TESSERA_HOST_DEVICE float operator()(float weight, float gradient, float decay,
                                                              float& velocity) const noexcept {
    auto const g = gradient_scale * gradient + decay * weight;
    velocity = momentum * velocity + g;
    auto const ahead = g + momentum * velocity;
    return weight - rate * (look_ahead != 0 ? ahead : velocity);
  }
};

/// The update of one element without momentum.
struct descent_rule {
  static constexpr int slots = 0;

  float gradient_scale, rate;

  explicit descent_rule(step_values const& values)
      : gradient_scale(static_cast<float>(values.gradient_scale)),
        rate(static_cast<float>(values.learning_rate)) {}

  [[gnu::always_inline]] TESSERA_HOST_DEVICE float operator()(float weight, float gradient,
                                                              float decay) const noexcept {
    return weight - rate * (gradient_scale * gradient + decay * weight);
  }
};

/// The state of one flat shard: the velocity, where there is momentum, and an fp32 master where weights are
/// 16-bit.
template <exec::space Ex, storage_scalar T>
class sgd {
public:
  using options_type = sgd_options;
  using memory = typename Ex::memory;
  static constexpr bool has_master = !std::same_as<T, float>;

  static constexpr index_t state_bytes(sgd_options const& options) noexcept {
    return (has_master ? 4 : 0) + (options.momentum != 0 ? 4 : 0);
  }

  /// `decayed`: the elements that weight decay acts on, in order and disjoint. Throws config_error for
  /// Nesterov's look ahead without momentum.
  sgd(Ex&, index_t elements, sgd_options options, std::vector<layout::range> decayed,
      memory_account account = {nullptr, memory_kind::optimizer_state}, site where = site::here())
      : elements_(elements), options_(options), decayed_(static_cast<std::vector<layout::range>&&>(decayed)),
        master_({has_master ? elements : 0}, account, where),
        velocity_({options.momentum != 0 ? elements : 0}, account, where) {
    if (options.nesterov && options.momentum == 0)
      throw config_error("E-optim-008", where, "nesterov looks ahead along the momentum, and momentum is 0");
  }

  index_t elements() const noexcept { return elements_; }
  sgd_options const& options() const noexcept { return options_; }

  /// Sets the master weights, from the weights as stored or from better known fp32 values.
  template <span_in<memory> Values>
    requires(std::same_as<typename Values::value_type, T> || std::same_as<typename Values::value_type, float>)
  void start_from(Ex& ex, Values values, site where = site::here()) {
    if constexpr (has_master) flat_copy(ex, master_.span(), values, where);
  }

  template <span_in<memory> Gradients>
    requires storage_scalar<typename Gradients::value_type>
  void step(Ex& ex, memory_span<T, memory> weights, Gradients gradients, step_values const& values,
            site where = site::here()) {
    using G = typename Gradients::value_type;
    auto const decay = static_cast<float>(options_.weight_decay);
    if (options_.momentum != 0)
      flat_update(ex,
                  flat_shard<T, G, 1, memory>{.weights = weights,
                                              .master = master_.span(),
                                              .gradients = gradients,
                                              .state = {velocity_.span()},
                                              .decayed = decayed_},
                  sgd_rule(options_, values), decay, where);
    else
      flat_update(
          ex,
          flat_shard<T, G, 0, memory>{
              .weights = weights, .master = master_.span(), .gradients = gradients, .decayed = decayed_},
          descent_rule(values), decay, where);
  }

  std::vector<state_array<memory>> state() {
    std::vector<state_array<memory>> arrays;
    if constexpr (has_master) arrays.push_back({"master", master_.span()});
    if (options_.momentum != 0) arrays.push_back({"momentum_buffer", velocity_.span()});
    return arrays;
  }

private:
  index_t elements_;
  sgd_options options_;
  std::vector<layout::range> decayed_;
  tensor<float, 1, memory> master_, velocity_;
};

} // namespace tessera::inline TESSERA_ABI::optim

#endif
