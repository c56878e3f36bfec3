/// Softmax cross-entropy over a vocabulary that is cut among ranks: each has the logits of its own classes,
/// and four numbers a row pass between them.
///
///     ops::softmax_statistics(ex, mine, logits, targets, {.first_class = 1000, .classes = 50257});
///     comm.all_gather(all, mine);                                 // [ranks, rows, 4]
///     ops::merge_softmax_statistics(ex, mine, all);
///     ops::cross_entropy_of(ex, logits, losses, targets, mine,
///                           {.first_class = 1000, .classes = 50257, .write_gradient = true});
///
/// Loss and gradient are those of ops/cross_entropy.hpp; every rank gets each row's whole loss, and the
/// gradient of its own logits. Parts are merged in the order of the ranks, so that all have the same bits.
///
/// Cost: the logits are read once for the statistics, and once more and written where the gradient is asked
/// for.
#ifndef TESSERA_OPS_SLICED_CROSS_ENTROPY_HPP
#define TESSERA_OPS_SLICED_CROSS_ENTROPY_HPP

#include <tessera/ops/cross_entropy.hpp>
#include <tessera/ops/detail/vocabulary_slice.hpp>

namespace tessera::inline TESSERA_ABI::ops {

/// What a row of statistics holds: the softmax of some of its logits, and the target's where it is among
/// them.
struct softmax_statistics_row {
  softmax_part part;
  float target_logit = 0;

  static constexpr index_t width = 4;

  TESSERA_HOST_DEVICE static softmax_statistics_row read(float const* row) noexcept {
    return {{row[0], row[1], row[2]}, row[3]};
  }
  TESSERA_HOST_DEVICE void write(float* row) const noexcept {
    row[0] = part.maximum;
    row[1] = part.exponential_sum;
    row[2] = part.logit_sum;
    row[3] = target_logit;
  }
};

/// Of the `ranks` parts of a row, each `stride` elements behind the one before.
TESSERA_HOST_DEVICE inline softmax_statistics_row merged_row(float const* parts, index_t ranks,
                                                             index_t stride) noexcept {
  softmax_statistics_row all;
  for (index_t rank = 0; rank < ranks; ++rank) {
    auto const one = softmax_statistics_row::read(parts + rank * stride);
    all = {merged(all.part, one.part), all.target_logit + one.target_logit};
  }
  return all;
}

struct softmax_statistics_options {
  index_t first_class = 0; ///< Which class the first column of logits is.
  index_t classes = 0;     ///< Of the whole vocabulary; 0: the columns are all there are.
};

template <memory_space M = host_memory>
struct sliced_cross_entropy_options {
  index_t first_class = 0;   ///< As for the statistics.
  index_t classes = 0;       ///< As for the statistics.
  float label_smoothing = 0; ///< This and the others: as in cross_entropy.
  float z_loss = 0;
  float gradient_scale = 1;
  bool write_gradient = false;
  view<double, 1, M> totals = {};
};

/// One implementation a backend: `statistics(ex, statistics, logits, targets, slice, where)`,
/// `merge(ex, merged, parts, where)`, `finish(ex, logits, losses, targets, statistics, slice, options,
/// where)`, where `slice` is a detail::vocabulary_slice and the options are cross_entropy's.
template <class Backend>
struct sliced_cross_entropy_on;

/// statistics [rows, 4]: a row's largest logit, the sum of exp(x - it), the sum of the logits, and the
/// target's logit (0 where that is another rank's) of logits [rows, columns], which may lie apart and have no
/// columns. Rows that are ignored have the statistics of no logits. Throws size_error where shapes differ or
/// the slice is no part of the vocabulary, or a target is outside it (on a device later, as cross_entropy
/// does).
template <exec::space Ex, class T>
  requires storage_scalar<std::remove_const_t<T>>
void softmax_statistics(Ex& ex, std::type_identity_t<view<float, 2, typename Ex::memory>> statistics,
                        view<T, 2, typename Ex::memory> logits,
                        input<std::int32_t, 1, typename Ex::memory> targets,
                        softmax_statistics_options options = {}, site where = site::here()) {
  constexpr auto name = "softmax_statistics";
  auto const rows = logits.extent(0);
  require_dense_rows(name, "logits", logits, where);
  require_extents(name, "statistics", statistics, {rows, softmax_statistics_row::width}, where);
  require_contiguous(name, "statistics", statistics, where);
  require_extents(name, "targets", targets, {rows}, where);
  require_contiguous(name, "targets", targets, where);
  detail::vocabulary_slice const slice(name, options.first_class, logits.extent(1), options.classes, where);
  sliced_cross_entropy_on<typename Ex::backend>::statistics(
      ex, statistics, view<std::remove_const_t<T> const, 2, typename Ex::memory>(logits), targets, slice,
      where);
}

/// merged [rows, 4]: the statistics of all the classes whose parts [ranks, rows, 4] are given, first rank
/// first. May be one of the parts. No sum overflows that the row's own softmax would not.
template <exec::space Ex>
void merge_softmax_statistics(Ex& ex, view<float, 2, typename Ex::memory> merged,
                              input<float, 3, typename Ex::memory> parts, site where = site::here()) {
  constexpr auto name = "merge_softmax_statistics";
  require_extents(name, "merged", merged, {parts.extent(1), softmax_statistics_row::width}, where);
  require_extents(name, "parts", parts, {parts.extent(0), parts.extent(1), softmax_statistics_row::width},
                  where);
  require_contiguous(name, "merged", merged, where);
  require_contiguous(name, "parts", parts, where);
  sliced_cross_entropy_on<typename Ex::backend>::merge(ex, merged, parts, where);
}

/// Losses, and with .write_gradient the gradient in place of the logits, as `cross_entropy` would leave them,
/// from the merged statistics of all classes. Every rank has the whole losses and returns, or adds to totals,
/// their sum and count: over ranks, one of them counts. Throws as cross_entropy and softmax_statistics do.
template <exec::space Ex, storage_scalar T>
sum_and_count cross_entropy_of(Ex& ex, view<T, 2, typename Ex::memory> logits,
                               std::type_identity_t<view<float, 1, typename Ex::memory>> losses,
                               input<std::int32_t, 1, typename Ex::memory> targets,
                               input<float, 2, typename Ex::memory> statistics,
                               sliced_cross_entropy_options<typename Ex::memory> options = {},
                               site where = site::here()) {
  constexpr auto name = "cross_entropy_of";
  auto const rows = logits.extent(0);
  require_dense_rows(name, "logits", logits, where);
  require_extents(name, "losses", losses, {rows}, where);
  require_extents(name, "targets", targets, {rows}, where);
  require_extents(name, "statistics", statistics, {rows, softmax_statistics_row::width}, where);
  require_contiguous(name, "losses", losses, where);
  require_contiguous(name, "targets", targets, where);
  require_contiguous(name, "statistics", statistics, where);
  detail::vocabulary_slice const slice(name, options.first_class, logits.extent(1), options.classes, where);
  cross_entropy_options<typename Ex::memory> const of_all{.label_smoothing = options.label_smoothing,
                                                          .z_loss = options.z_loss,
                                                          .gradient_scale = options.gradient_scale,
                                                          .write_gradient = options.write_gradient,
                                                          .totals = options.totals};
  detail::require_loss_options(name, of_all, where);
  return sliced_cross_entropy_on<typename Ex::backend>::finish(ex, logits, losses, targets, statistics, slice,
                                                               of_all, where);
}

} // namespace tessera::inline TESSERA_ABI::ops

#include <tessera/ops/host/sliced_cross_entropy.hpp>

#endif
