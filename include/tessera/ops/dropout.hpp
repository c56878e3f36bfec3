/// Dropout (Srivastava et al., 2014): each element is set to zero with the given probability, the others are
/// divided by the probability of staying.
///
///     ops::dropout(ex, out, in, {.probability = 0.1f, .seed = seed, .step = step, .layer = 3,
///                                .first_sample = first_sample, .rows_per_sample = sequence_length});
///     ops::dropout(ex, d_in, d_out, the_same);         // backward: the same mask
///     ops::dropout_add(ex, out, residual, in, the_same);   // residual + dropout(in)
///
///     // Row 96 and on of the flattened [batch, 64] tokens that this rank holds, of samples of 256:
///     {..., .first_sample = n, .rows_per_sample = 64, .first_row = 96, .whole_rows_per_sample = 256,
///      .positions = {.first = 64}}
///
/// The mask is a function of seed, step, layer, the sample's number within the step's global batch and the
/// element within the sample; it is never stored, and does not depend on how the batch is cut into
/// micro-batches and ranks, how a sample is cut into parts, nor on what ran before. Cost: one read and one
/// write an element.
#ifndef TESSERA_OPS_DROPOUT_HPP
#define TESSERA_OPS_DROPOUT_HPP

#include <tessera/core/philox.hpp>
#include <tessera/core/scalar.hpp>
#include <tessera/exec/space.hpp>
#include <tessera/ops/elementary.hpp>
#include <tessera/ops/shapes.hpp>
#include <tessera/ops/token_positions.hpp>

namespace tessera::inline TESSERA_ABI::ops {

struct dropout_options {
  float probability = 0;       ///< Of an element to be dropped, in [0, 1].
  std::uint64_t seed = 0;      ///< Of the run.
  std::uint64_t step = 0;      ///< Optimizer step, below 2^48.
  std::uint64_t layer = 0;     ///< Which dropout of the model, below 2^16.
  index_t first_sample = 0;    ///< Number within the step's global batch of the first sample that is here.
  index_t rows_per_sample = 1; ///< Rows (tokens) of one sample that are here.

  // Where the call's rows are a part of those samples, or the samples that are here parts of longer ones.
  index_t first_row = 0;             ///< Rows of those samples before the call's first.
  index_t whole_rows_per_sample = 0; ///< Rows of a whole sample; 0: they are all here.
  token_positions positions = {};    ///< Of the rows of a sample that are here within the whole one.
};

/// Elements of a call whose numbers follow each other, from a given one on.
struct dropout_run {
  std::uint64_t index;
  index_t count;
};

/// Semantics: the number of an element, and how many follow it.
template <class N>
concept dropout_numbers = requires(N const& numbers) {
  { numbers(index_t{}) } -> std::same_as<dropout_run>;
};

/// The numbers of a call's elements where they all follow each other.
struct dropout_in_order {
  std::uint64_t first_index;

  TESSERA_HOST_DEVICE dropout_run operator()(index_t element) const noexcept {
    return {first_index + static_cast<std::uint64_t>(element), (std::numeric_limits<index_t>::max)()};
  }
};

/// The numbers of a call's elements: (sample * whole_rows_per_sample + position) * width + column.
struct dropout_in_parts {
  index_t width, first_sample, rows_per_sample, first_row, whole;
  token_positions positions;

  dropout_in_parts(dropout_options const& options, index_t columns) noexcept
      : width(columns), first_sample(options.first_sample), rows_per_sample(options.rows_per_sample),
        first_row(options.first_row),
        whole(options.whole_rows_per_sample == 0 ? rows_per_sample : options.whole_rows_per_sample),
        positions(options.positions) {}

  TESSERA_HOST_DEVICE dropout_run operator()(index_t element) const noexcept {
    auto const row = first_row + element / width, column = element % width;
    auto const sample = first_sample + row / rows_per_sample, here = row % rows_per_sample;
    auto const end = here < positions.split ? positions.before_split(rows_per_sample) : rows_per_sample;
    return {static_cast<std::uint64_t>((sample * whole + positions(here)) * width + column),
            (end - here) * width - column};
  }
  /// Whether all rows of whole samples are here, in order.
  bool whole_samples() const noexcept {
    return whole == rows_per_sample && positions.before_split(whole) == whole;
  }
};

/// The mask of a call.
template <dropout_numbers Numbers>
struct dropout_mask {
  philox random;
  float probability, scale;
  Numbers numbers;

  dropout_mask(dropout_options const& options, Numbers of_elements) noexcept
      : random(options.seed, (options.layer << 48 ^ options.step) ^ 0x64726f706f757421u),
        probability(options.probability), scale(1.0f / (1.0f - options.probability)), numbers(of_elements) {}

  /// x scaled, or zero: `bits` are those of the element, random.bits(its number).
  [[gnu::always_inline]] TESSERA_HOST_DEVICE float apply(float x, std::uint32_t bits) const noexcept {
    return elementary::select(philox::unit_interval(bits) < probability, 0.0f, x * scale);
  }
};

/// One implementation a backend: `run(ex, out, residual, in, mask)` over flat views; residual may be empty.
template <class Backend>
struct dropout_on;

namespace detail {

template <exec::space Ex, storage_scalar T, storage_scalar In>
void dropout(char const* name, Ex& ex, view<T, 2, typename Ex::memory> out,
             view<T const, 2, typename Ex::memory> residual, view<In const, 2, typename Ex::memory> in,
             dropout_options const& options, site where) {
  require_extents(name, "out", out, in.extents(), where);
  require_extents_or_none(name, "residual", residual, in.extents(), where);
  require_contiguous(name, "out", out, where);
  require_contiguous(name, "residual", residual, where);
  require_contiguous(name, "in", in, where);
  if (!(options.probability >= 0 && options.probability <= 1))
    throw config_error("E-ops-012", where, name, ": probability is ", options.probability,
                       ", must lie in [0, 1]");
  if (options.first_sample < 0 || options.rows_per_sample < 1 || options.first_row < 0 ||
      options.step >> 48 != 0 || options.layer >> 16 != 0)
    throw size_error("E-ops-013", where, name, ": first_sample ", options.first_sample, " and first_row ",
                     options.first_row, " must not be negative, rows_per_sample ", options.rows_per_sample,
                     " must be positive, step ", options.step, " below 2^48 and layer ", options.layer,
                     " below 2^16");
  dropout_in_parts const parts(options, in.extent(1));
  if (!options.positions.fit(parts.rows_per_sample, parts.whole))
    throw size_error("E-ops-013", where, name, ": rows ", options.positions.text(parts.rows_per_sample),
                     " of a sample are here, it has ", parts.whole, " (whole_rows_per_sample)");
  if (in.empty()) return;
  using backend = dropout_on<typename Ex::backend>;
  auto const first = parts(0);
  if (parts.whole_samples() || first.count >= in.size())
    backend::run(ex, out, residual, in, dropout_mask(options, dropout_in_order{first.index}));
  else
    backend::run(ex, out, residual, in, dropout_mask(options, parts));
}

} // namespace detail

/// out = dropout(in), [rows, width], contiguous; out may be in (of one type). Throws size_error, or
/// config_error for an impossible probability.
template <exec::space Ex, storage_scalar T, scalar_input<2, typename Ex::memory> In>
void dropout(Ex& ex, view<T, 2, typename Ex::memory> out, In const& in, dropout_options const& options,
             site where = site::here()) {
  detail::dropout("dropout", ex, out, view<T const, 2, typename Ex::memory>{},
                  reading<2, typename Ex::memory>(in), options, where);
}

/// out = residual + dropout(in); out may be either input.
template <exec::space Ex, storage_scalar T>
void dropout_add(Ex& ex, view<T, 2, typename Ex::memory> out, input<T, 2, typename Ex::memory> residual,
                 input<T, 2, typename Ex::memory> in, dropout_options const& options,
                 site where = site::here()) {
  require_extents("dropout_add", "residual", residual, in.extents(), where);
  detail::dropout("dropout_add", ex, out, residual, in, options, where);
}

} // namespace tessera::inline TESSERA_ABI::ops

#include <tessera/ops/host/dropout.hpp>

#endif
