/// sliced_cross_entropy on the host: the passes of cross_entropy, a thread for whole rows, with a pause
/// between them.
#ifndef TESSERA_OPS_HOST_SLICED_CROSS_ENTROPY_HPP
#define TESSERA_OPS_HOST_SLICED_CROSS_ENTROPY_HPP

#include <tessera/ops/host/cross_entropy.hpp>
#include <tessera/ops/sliced_cross_entropy.hpp>

namespace tessera::inline TESSERA_ABI::ops {

template <>
struct sliced_cross_entropy_on<exec::host_backend> {
  template <exec::host_space Ex, storage_scalar T>
  static void statistics(Ex& ex, view<float, 2> statistics, view<T const, 2> logits,
                         view<std::int32_t const, 1> targets, detail::vocabulary_slice slice, site where) {
    host_detail::require_targets("softmax_statistics", targets, slice.vocabulary, where);
    host_detail::for_rows(ex, logits.extent(0), slice.size, [=](index_t row) {
      softmax_statistics_row result;
      if (auto const target = targets(row); target != ignore_index) {
        auto const* x = logits.data() + row * logits.stride(0);
        auto const sums = host_detail::softmax_of(x, slice.size, true);
        result.part = {sums.maximum, static_cast<float>(sums.exponentials), static_cast<float>(sums.logits)};
        if (auto const at = slice.place_of(target); at >= 0) result.target_logit = static_cast<float>(x[at]);
      }
      result.write(&statistics(row, 0));
    });
  }

  template <exec::host_space Ex>
  static void merge(Ex& ex, view<float, 2> merged, view<float const, 3> parts, site) {
    auto const ranks = parts.extent(0);
    host_detail::for_rows(ex, merged.extent(0), ranks * softmax_statistics_row::width, [=](index_t row) {
      merged_row(parts.data() + row * parts.stride(1), ranks, parts.stride(0)).write(&merged(row, 0));
    });
  }

  template <exec::host_space Ex, storage_scalar T>
  static sum_and_count finish(Ex& ex, view<T, 2> logits, view<float, 1> losses,
                              view<std::int32_t const, 1> targets, view<float const, 2> statistics,
                              detail::vocabulary_slice slice, cross_entropy_options<> const& options,
                              site where) {
    host_detail::require_targets("cross_entropy_of", targets, slice.vocabulary, where);
    host_detail::for_rows(ex, logits.extent(0), slice.size, [&](index_t row) {
      auto* x = logits.data() + row * logits.stride(0);
      auto const target = targets(row);
      if (target == ignore_index) {
        losses(row) = 0;
        if (options.write_gradient)
          for (index_t i = 0; i < slice.size; ++i) x[i] = T(0.0f);
        return;
      }
      auto const all = softmax_statistics_row::read(&statistics(row, 0));
      auto const softmax = row_of(all.part, slice.vocabulary, options);
      losses(row) = cross_entropy_loss(softmax, all.target_logit, options);
      if (options.write_gradient)
        host_detail::write_slopes(x, slice.size, softmax.maximum,
                                  cross_entropy_slope(softmax, slice.vocabulary, options),
                                  slice.place_of(target));
    });
    return host_detail::total_of(losses, targets, options.totals);
  }
};

} // namespace tessera::inline TESSERA_ABI::ops

#endif
