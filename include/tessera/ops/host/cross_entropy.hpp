/// cross_entropy on the host: a thread takes whole rows; a row goes through in pieces that fit the
/// first-level cache, with a running maximum (online softmax, Milakov and Gimelshein, 2018), and once more
/// for its gradient.
#ifndef TESSERA_OPS_HOST_CROSS_ENTROPY_HPP
#define TESSERA_OPS_HOST_CROSS_ENTROPY_HPP

#include <cmath>

#include <tessera/ops/cross_entropy.hpp>
#include <tessera/ops/host/detail/loops.hpp>

namespace tessera::inline TESSERA_ABI::ops {

template <>
struct cross_entropy_on<exec::host_backend> {
  template <exec::host_space Ex, storage_scalar T>
  static sum_and_count run(Ex& ex, view<T, 2> logits, view<float, 1> losses,
                           view<std::int32_t const, 1> targets, cross_entropy_options<> const& options,
                           site where) {
    auto const rows = logits.extent(0), classes = logits.extent(1);
    for (index_t row = 0; row < rows; ++row)
      if (auto const target = targets(row); target != ignore_index && (target < 0 || target >= classes))
        throw size_error("E-ops-004", where, "cross_entropy: the target of row ", row, " is ", target,
                         ", must lie in [0, ", classes, ") or be ignore_index (", ignore_index, ")");

    host_detail::for_rows(ex, rows, classes, [&](index_t row) {
      auto* x = &logits(row, 0);
      auto const target = targets(row);
      if (target == ignore_index) {
        losses(row) = 0;
        if (options.write_gradient)
          for (index_t i = 0; i < classes; ++i) x[i] = T(0.0f);
        return;
      }
      auto const softmax = softmax_of(x, classes, options.label_smoothing > 0);
      auto const target_logit = static_cast<float>(x[target]);
      losses(row) = cross_entropy_loss(softmax, target_logit, options);
      if (!options.write_gradient) return;
      auto const g = cross_entropy_slope(softmax, classes, options);
      auto const maximum = softmax.maximum;
      TESSERA_SIMD()
      for (index_t i = 0; i < classes; ++i)
        store(x[i], elementary::exp(static_cast<float>(x[i]) - maximum) * g.slope - g.even);
      x[target] = T(elementary::exp(target_logit - maximum) * g.slope - g.even - g.target);
    });

    sum_and_count total;
    for (index_t row = 0; row < rows; ++row) {
      total.sum += losses(row);
      total.count += targets(row) != ignore_index ? 1 : 0;
    }
    if (options.totals.empty()) return total;
    options.totals(0) += total.sum;
    options.totals(1) += total.count;
    return {};
  }

private:
  template <storage_scalar T>
  static softmax_row softmax_of(T const* x, index_t classes, bool with_mean) {
    constexpr index_t piece = 2048;
    auto maximum = -0x1.fffffep+127f; // the lowest finite number: rows may begin with minus infinities
    auto exponentials = 0.0, logits = 0.0;
    for (index_t begin = 0; begin < classes; begin += piece) {
      auto const count = classes - begin < piece ? classes - begin : piece;
      auto const* part = x + begin;
      auto const higher = elementary::larger(
          maximum, host_detail::maximum(count, [&](index_t i) { return static_cast<float>(part[i]); }));
      exponentials *= elementary::exp(maximum - higher);
      maximum = higher;
      exponentials += host_detail::sum(
          count, [&](index_t i) { return elementary::exp(static_cast<float>(part[i]) - maximum); });
      if (with_mean)
        logits += host_detail::sum(count, [&](index_t i) { return static_cast<float>(part[i]); });
    }
    return {maximum, static_cast<float>(exponentials), static_cast<float>(maximum + std::log(exponentials)),
            static_cast<float>(logits / static_cast<double>(classes))};
  }
};

} // namespace tessera::inline TESSERA_ABI::ops

#endif
