/// Softmax cross-entropy over a vocabulary, forward and backward in one go: each row of logits is read while
/// it sits in cache and may be replaced by its gradient. Losses are a sum and a count; nothing is averaged.
///
///     auto loss = ops::cross_entropy(ex, logits, losses, targets, {.write_gradient = true});
///     loss.sum / loss.count;   // mean negative log likelihood in nats, once all parts are added up
///     ops::cross_entropy(ex, logits, losses, targets, {.totals = totals});   // += {sum, count}, no wait
///
/// With p = softmax(x), t the target and s the label smoothing over V classes, a row's loss is
///     log(sum exp x) - (1 - s) x_t - s mean(x) + z_loss * log(sum exp x)^2,
/// and its gradient  p (1 + 2 z_loss log(sum exp x)) - (1 - s) [i = t] - s / V,  times gradient_scale.
///
/// Cost: the logits are read from memory once, and written once where the gradient is asked for.
#ifndef TESSERA_OPS_CROSS_ENTROPY_HPP
#define TESSERA_OPS_CROSS_ENTROPY_HPP

#include <tessera/core/scalar.hpp>
#include <tessera/exec/space.hpp>
#include <tessera/ops/elementary.hpp>
#include <tessera/ops/shapes.hpp>

namespace tessera::inline TESSERA_ABI::ops {

/// A target that predicts nothing: the row's loss and gradient are zero and it is not counted.
inline constexpr std::int32_t ignore_index = -100;

template <memory_space M = host_memory>
struct cross_entropy_options {
  float label_smoothing = 0; ///< In [0, 1]: share of the target's probability spread evenly over all classes.
  float z_loss = 0;          ///< Weight of the squared log partition function (keeps logits small).
  float gradient_scale = 1;  ///< Factor on the gradient, not on the loss.
  bool write_gradient = false; ///< Replace the logits by their gradient.
  /// [2]: sum and count are added here where the space runs, and the call returns zeros: nobody waits for the
  /// device. Empty: the call waits for them and returns them.
  view<double, 1, M> totals = {};
};

struct sum_and_count {
  double sum = 0;   ///< Of the losses, in nats.
  double count = 0; ///< Of the rows that are not ignored.
};

/// What the softmax of some of a row's logits comes to.
struct softmax_part {
  float maximum = -0x1.fffffep+127f; ///< The lowest finite number: rows may begin with minus infinities.
  float exponential_sum = 0;         ///< Of exp(x - maximum).
  float logit_sum = 0;
};

/// That of both parts' logits.
TESSERA_HOST_DEVICE inline softmax_part merged(softmax_part const& a, softmax_part const& b) noexcept {
  softmax_part both;
  both.maximum = elementary::larger(a.maximum, b.maximum);
  both.exponential_sum = a.exponential_sum * elementary::exp(a.maximum - both.maximum) +
                         b.exponential_sum * elementary::exp(b.maximum - both.maximum);
  both.logit_sum = a.logit_sum + b.logit_sum;
  return both;
}

/// What one row's softmax comes to.
struct softmax_row {
  float maximum = 0;
  float exponential_sum = 0; ///< Of exp(x - maximum).
  float log_sum = 0;         ///< log(sum exp x).
  float mean = 0;            ///< Of the logits; needed for label smoothing only.
};

/// The row whose logits are all in `part`.
template <memory_space M>
TESSERA_HOST_DEVICE softmax_row row_of(softmax_part const& part, index_t classes,
                                       cross_entropy_options<M> const& options) noexcept {
  return {part.maximum, part.exponential_sum, part.maximum + elementary::log(part.exponential_sum),
          options.label_smoothing > 0 ? part.logit_sum / static_cast<float>(classes) : 0.0f};
}

template <memory_space M>
TESSERA_HOST_DEVICE float cross_entropy_loss(softmax_row row, float target_logit,
                                             cross_entropy_options<M> const& options) noexcept {
  return row.log_sum - (1.0f - options.label_smoothing) * target_logit - options.label_smoothing * row.mean +
         options.z_loss * row.log_sum * row.log_sum;
}

/// The gradient of a row's loss in logit x is exp(x - maximum) * slope - even, and `target` less at the
/// target.
struct cross_entropy_slope {
  float slope, even, target;

  template <memory_space M>
  TESSERA_HOST_DEVICE cross_entropy_slope(softmax_row row, index_t classes,
                                          cross_entropy_options<M> const& options) noexcept
      : slope(options.gradient_scale * (1.0f + 2.0f * options.z_loss * row.log_sum) / row.exponential_sum),
        even(options.gradient_scale * options.label_smoothing / static_cast<float>(classes)),
        target(options.gradient_scale * (1.0f - options.label_smoothing)) {}
};

namespace detail {

template <memory_space M>
void require_loss_options(char const* operation, cross_entropy_options<M> const& options, site where) {
  require_extents_or_none(operation, "totals", options.totals, {2}, where);
  require_contiguous(operation, "totals", options.totals, where);
  if (!(options.label_smoothing >= 0 && options.label_smoothing <= 1))
    throw config_error("E-ops-005", where, operation, ": label_smoothing is ", options.label_smoothing,
                       ", must lie in [0, 1]");
  if (!(options.z_loss >= 0))
    throw config_error("E-ops-006", where, operation, ": z_loss is ", options.z_loss,
                       ", must not be negative");
}

} // namespace detail

/// One implementation a backend: `run(ex, logits, losses, targets, options, where)`.
template <class Backend>
struct cross_entropy_on;

/// logits [rows, V], losses [rows], targets [rows]; rows of logits may lie apart. Leaves each row's loss in
/// `losses` (0 where ignored) and, with .write_gradient, its gradient in `logits`. Throws size_error where
/// shapes differ, or where a target is neither in [0, V) nor ignore_index; config_error for impossible
/// options. A bad target is found before anything is written on the host, and by the device while it works
/// elsewhere: there that row's loss and gradient are NaN, and the next call that waits for the space throws.
template <exec::space Ex, storage_scalar T>
sum_and_count cross_entropy(Ex& ex, view<T, 2, typename Ex::memory> logits,
                            std::type_identity_t<view<float, 1, typename Ex::memory>> losses,
                            input<std::int32_t, 1, typename Ex::memory> targets,
                            cross_entropy_options<typename Ex::memory> options = {},
                            site where = site::here()) {
  require_dense_rows("cross_entropy", "logits", logits, where);
  require_extents("cross_entropy", "losses", losses, {logits.extent(0)}, where);
  require_extents("cross_entropy", "targets", targets, {logits.extent(0)}, where);
  require_contiguous("cross_entropy", "losses", losses, where);
  require_contiguous("cross_entropy", "targets", targets, where);
  detail::require_loss_options("cross_entropy", options, where);
  return cross_entropy_on<typename Ex::backend>::run(ex, logits, losses, targets, options, where);
}

} // namespace tessera::inline TESSERA_ABI::ops

#include <tessera/ops/host/cross_entropy.hpp>

#endif
