/// The head of a language model: logits = in weight^T, softmax cross-entropy with the targets, and both
/// gradients, in one call. Logits exist for `chunk_rows` rows at a time only, and their gradient takes their
/// place, so memory does not grow with rows times vocabulary.
///
///     auto loss = ops::linear_cross_entropy(ex, {d_in, d_weight}, in, weight, targets, {}, memory);
///     auto loss = ops::linear_cross_entropy<exec::host, T, T>(ex, {}, in, weight, targets, {}, memory);
///
/// Where the vocabulary is cut among ranks, `weight` is this rank's slice of it, and a function that the
/// caller gives merges each chunk's statistics over the ranks (ops/sliced_cross_entropy.hpp):
///
///     auto merge = [&](exec::host& ex, view<float, 2> statistics) {          // [rows of the chunk, 4]
///       comm.all_gather(all, statistics);
///       ops::merge_softmax_statistics(ex, statistics, all);
///     };
///     ops::linear_cross_entropy(ex, {d_in, d_weight}, in, weight, targets,
///                               {.first_class = 1000, .classes = 50257}, memory, merge);
///
/// Cost: 2 rows w V operations forward, 4 rows w V more with gradients; the weight is read once a chunk.
#ifndef TESSERA_OPS_LINEAR_CROSS_ENTROPY_HPP
#define TESSERA_OPS_LINEAR_CROSS_ENTROPY_HPP

#include <tessera/core/arena.hpp>
#include <tessera/ops/cross_entropy.hpp>
#include <tessera/ops/matmul.hpp>
#include <tessera/ops/sliced_cross_entropy.hpp>

namespace tessera::inline TESSERA_ABI::ops {

template <memory_space M = host_memory>
struct linear_cross_entropy_options {
  float label_smoothing = 0;      ///< As in cross_entropy.
  float z_loss = 0;               ///< As in cross_entropy.
  float gradient_scale = 1;       ///< Factor on the gradient of the loss sum.
  bool accumulate = false;        ///< Add to d_weight instead of overwriting it.
  index_t chunk_rows = 0;         ///< Rows whose logits are held at once; 0 stands for 512 (device: 4096).
  view<double, 1, M> totals = {}; ///< As in cross_entropy.
  index_t first_class = 0;        ///< Which class the weight's first row is.
  index_t classes = 0;            ///< Of the whole vocabulary; 0: the weight's rows are all there are.
};

/// Merges nothing: the weight is the whole vocabulary's.
struct whole_vocabulary {
  template <exec::space Ex>
  void operator()(Ex&, view<float, 2, typename Ex::memory>) const noexcept {}
};

/// Semantics: puts the statistics of all classes, [rows, 4], in the place of those of the rank's own. Called
/// once a chunk, the same number of times on each rank.
template <class F, class Ex>
concept statistics_merge = std::invocable<F&, Ex&, view<float, 2, typename Ex::memory>>;

/// Where the gradients go; both empty for an evaluation. They may be stored in other types than the values.
template <storage_scalar D, storage_scalar G, memory_space M = host_memory>
struct linear_cross_entropy_gradients {
  view<D, 2, M> input = {};  ///< [rows, w], overwritten.
  view<G, 2, M> weight = {}; ///< [V, w]
};

namespace detail {

/// A processor's caches want few rows, a device enough of them to be busy.
template <memory_space M>
constexpr index_t chunk_of(index_t rows, index_t chunk_rows) noexcept {
  auto const chunk = chunk_rows > 0 ? chunk_rows : index_t{M::host_accessible ? 512 : 4096};
  return rows < chunk ? rows : chunk;
}

/// Elements from row to row of the logits: each row begins at a boundary that products and 16-byte accesses
/// are fast on, whatever the vocabulary.
constexpr index_t padded_vocabulary(index_t vocabulary) noexcept {
  return (vocabulary + 63) / 64 * 64;
}

} // namespace detail

/// Bytes that the call below takes from the arena, and gives back, for a weight of so many rows;
/// `with_merge`: where statistics are merged over ranks.
template <storage_scalar T, memory_space M = host_memory>
constexpr index_t linear_cross_entropy_scratch_bytes(index_t rows, index_t vocabulary, index_t chunk_rows = 0,
                                                     bool with_merge = false) noexcept {
  auto const chunk = detail::chunk_of<M>(rows, chunk_rows);
  return arena<M>::template bytes_for<T>(chunk * detail::padded_vocabulary(vocabulary)) +
         arena<M>::template bytes_for<float>(chunk) +
         (with_merge ? arena<M>::template bytes_for<float>(chunk * softmax_statistics_row::width) : 0);
}

/// The summed loss of in[rows, w] weight[V, w]^T against targets[rows] (`ignore_index`: no loss, no gradient)
/// and the number of counted rows; the gradients of the sum times gradient_scale where views are given.
/// With a merge, weight may be a slice (or have no rows): the gradient of `in` is then this rank's summand,
/// and the loss the whole one on every rank. Throws size_error for extents that do not fit, a slice that is
/// no part of the vocabulary, or a target outside it (on a device later, as cross_entropy does).
template <exec::space Ex, storage_scalar D, storage_scalar G, statistics_merge<Ex> Merge = whole_vocabulary,
          scalar_input<2, typename Ex::memory> In>
sum_and_count
linear_cross_entropy(Ex& ex, linear_cross_entropy_gradients<D, G, typename Ex::memory> gradients,
                     In const& rows_in, input<value_of<In>, 2, typename Ex::memory> weight,
                     input<std::int32_t, 1, typename Ex::memory> targets,
                     linear_cross_entropy_options<typename Ex::memory> options,
                     arena<typename Ex::memory>& memory, Merge&& merge = {}, site where = site::here()) {
  constexpr auto whole = std::same_as<std::remove_cvref_t<Merge>, whole_vocabulary>;
  using T = value_of<In>;
  auto const in = reading<2, typename Ex::memory>(rows_in);
  auto const rows = in.extent(0), width = in.extent(1), vocabulary = weight.extent(0);
  auto const wants_input = gradients.input.data() != nullptr;
  auto const wants_weight = gradients.weight.data() != nullptr;
  require_rows("linear_cross_entropy", "weight", weight, {vocabulary, width}, where);
  require_extents("linear_cross_entropy", "targets", targets, {rows}, where);
  require_extents_or_none("linear_cross_entropy", "the gradient of in", gradients.input, in.extents(), where);
  require_extents_or_none("linear_cross_entropy", "the gradient of weight", gradients.weight,
                          weight.extents(), where);

  detail::vocabulary_slice const slice("linear_cross_entropy", options.first_class, vocabulary,
                                       options.classes, where);
  if (whole && slice.vocabulary != vocabulary)
    throw size_error("E-ops-015", where, "linear_cross_entropy: weight has ", vocabulary, " of ",
                     slice.vocabulary, " classes, and nothing was given that merges statistics over ranks");

  arena_scope const scope(memory);
  auto const chunk = detail::chunk_of<typename Ex::memory>(rows, options.chunk_rows);
  auto const logits = memory.template take<T, 2>({chunk, detail::padded_vocabulary(vocabulary)}, where)
                          .slice(1, 0, vocabulary);
  auto const losses = memory.template take<float, 1>({chunk}, where);
  view<float, 2, typename Ex::memory> statistics;
  if constexpr (!whole)
    statistics = memory.template take<float, 2>({chunk, softmax_statistics_row::width}, where);
  if (rows == 0 && wants_weight && !options.accumulate)
    matmul(ex, gradients.weight, logits, in, {.transpose_a = true}, where);

  sum_and_count total{};
  for (index_t row = 0; row < rows; row += chunk) {
    auto const end = row + chunk < rows ? row + chunk : rows;
    auto const part = in.slice(0, row, end);
    auto const part_logits = logits.slice(0, 0, end - row);
    matmul(ex, part_logits, part, weight, {.transpose_b = true}, where);
    auto const part_losses = losses.slice(0, 0, end - row);
    auto const part_targets = targets.slice(0, row, end);
    sum_and_count loss;
    if constexpr (whole) {
      loss = cross_entropy(ex, part_logits, part_losses, part_targets,
                           {.label_smoothing = options.label_smoothing,
                            .z_loss = options.z_loss,
                            .gradient_scale = options.gradient_scale,
                            .write_gradient = wants_input || wants_weight,
                            .totals = options.totals},
                           where);
    } else {
      auto const part_statistics = statistics.slice(0, 0, end - row);
      softmax_statistics(ex, part_statistics, part_logits, part_targets,
                         {.first_class = options.first_class, .classes = slice.vocabulary}, where);
      merge(ex, part_statistics);
      loss = cross_entropy_of(ex, part_logits, part_losses, part_targets, part_statistics,
                              {.first_class = options.first_class,
                               .classes = slice.vocabulary,
                               .label_smoothing = options.label_smoothing,
                               .z_loss = options.z_loss,
                               .gradient_scale = options.gradient_scale,
                               .write_gradient = wants_input || wants_weight,
                               .totals = options.totals},
                              where);
    }
    total.sum += loss.sum;
    total.count += loss.count;
    if (wants_input) matmul(ex, gradients.input.slice(0, row, end), part_logits, weight, {}, where);
    if (wants_weight)
      matmul(ex, gradients.weight, part_logits, part,
             {.transpose_a = true, .accumulate = options.accumulate || row > 0}, where);
  }
  return total;
}

} // namespace tessera::inline TESSERA_ABI::ops

#endif
