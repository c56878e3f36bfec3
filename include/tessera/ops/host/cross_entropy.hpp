/// cross_entropy on the host: a thread takes whole rows; a row goes through in pieces that fit the
/// first-level cache, with a running maximum (online softmax, Milakov and Gimelshein, 2018), and once more
/// for its gradient.
#ifndef TESSERA_OPS_HOST_CROSS_ENTROPY_HPP
#define TESSERA_OPS_HOST_CROSS_ENTROPY_HPP

#include <cmath>

#include <tessera/ops/cross_entropy.hpp>
#include <tessera/ops/host/detail/loops.hpp>

namespace tessera::inline TESSERA_ABI::ops {

namespace host_detail {

/// softmax_part before it is rounded.
struct softmax_sums {
  float maximum = softmax_part{}.maximum;
  double exponentials = 0, logits = 0;
};

/// The logits are added up on demand.
template <storage_scalar T>
softmax_sums softmax_of(T const* x, index_t classes, bool with_logits) {
  constexpr index_t piece = 2048;
  softmax_sums sums;
  for (index_t begin = 0; begin < classes; begin += piece) {
    auto const count = classes - begin < piece ? classes - begin : piece;
    auto const* part = x + begin;
    auto const higher = elementary::larger(
        sums.maximum, maximum(count, [&](index_t i) { return static_cast<float>(part[i]); }));
    sums.exponentials *= elementary::exp(sums.maximum - higher);
    sums.maximum = higher;
    sums.exponentials +=
        sum(count, [&](index_t i) { return elementary::exp(static_cast<float>(part[i]) - higher); });
    if (with_logits) sums.logits += sum(count, [&](index_t i) { return static_cast<float>(part[i]); });
  }
  return sums;
}

/// Turns logits into the gradient; `target` stands among them, or outside.
template <storage_scalar T>
void write_slopes(T* x, index_t classes, float maximum, cross_entropy_slope g, index_t target) {
  auto const inside = target >= 0 && target < classes;
  auto const target_logit = inside ? static_cast<float>(x[target]) : 0.0f;
  TESSERA_SIMD()
  for (index_t i = 0; i < classes; ++i)
    store(x[i], elementary::exp(static_cast<float>(x[i]) - maximum) * g.slope - g.even);
  if (inside) x[target] = T(elementary::exp(target_logit - maximum) * g.slope - g.even - g.target);
}

inline void require_targets(char const* operation, view<std::int32_t const, 1> targets, index_t classes,
                            site where) {
  for (index_t row = 0; row < targets.size(); ++row)
    if (auto const target = targets(row); target != ignore_index && (target < 0 || target >= classes))
      throw size_error("E-ops-004", where, operation, ": the target of row ", row, " is ", target,
                       ", must lie in [0, ", classes, ") or be ignore_index (", ignore_index, ")");
}

/// Adds the losses up, into totals or for the caller.
inline sum_and_count total_of(view<float const, 1> losses, view<std::int32_t const, 1> targets,
                              view<double, 1> totals) {
  sum_and_count total;
  for (index_t row = 0; row < losses.size(); ++row) {
    total.sum += static_cast<double>(losses(row));
    total.count += targets(row) != ignore_index ? 1 : 0;
  }
  if (totals.empty()) return total;
  totals(0) += total.sum;
  totals(1) += total.count;
  return {};
}

} // namespace host_detail

template <>
struct cross_entropy_on<exec::host_backend> {
  template <exec::host_space Ex, storage_scalar T>
  static sum_and_count run(Ex& ex, view<T, 2> logits, view<float, 1> losses,
                           view<std::int32_t const, 1> targets, cross_entropy_options<> const& options,
                           site where) {
    auto const rows = logits.extent(0), classes = logits.extent(1);
    host_detail::require_targets("cross_entropy", targets, classes, where);
    host_detail::for_rows(ex, rows, classes, [&](index_t row) {
      auto* x = &logits(row, 0);
      auto const target = targets(row);
      if (target == ignore_index) {
        losses(row) = 0;
        if (options.write_gradient)
          for (index_t i = 0; i < classes; ++i) x[i] = T(0.0f);
        return;
      }
      auto const sums = host_detail::softmax_of(x, classes, options.label_smoothing > 0);
      softmax_row const softmax{sums.maximum, static_cast<float>(sums.exponentials),
                                static_cast<float>(sums.maximum + std::log(sums.exponentials)),
                                static_cast<float>(sums.logits / static_cast<double>(classes))};
      losses(row) = cross_entropy_loss(softmax, static_cast<float>(x[target]), options);
      if (options.write_gradient)
        host_detail::write_slopes(x, classes, softmax.maximum, cross_entropy_slope(softmax, classes, options),
                                  target);
    });
    return host_detail::total_of(losses, targets, options.totals);
  }
};

} // namespace tessera::inline TESSERA_ABI::ops

#endif
