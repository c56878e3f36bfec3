/// Dropout (Srivastava et al., 2014): each element is set to zero with the given probability, the others are
/// divided by the probability of staying.
///
///     ops::dropout(ex, out, in, {.probability = 0.1f, .seed = seed, .step = step, .layer = 3,
///                                .first_sample = first_sample, .rows_per_sample = sequence_length});
///     ops::dropout(ex, d_in, d_out, the_same);         // backward: the same mask
///     ops::dropout_add(ex, out, residual, in, the_same);   // residual + dropout(in)
///
/// The mask is a function of seed, step, layer, the sample's number within the step's global batch and the
/// element within the sample; it is never stored, and does not depend on how the batch is cut into
/// micro-batches and ranks, nor on what ran before. Cost: one read and one write an element.
#ifndef TESSERA_OPS_DROPOUT_HPP
#define TESSERA_OPS_DROPOUT_HPP

#include <tessera/core/philox.hpp>
#include <tessera/core/scalar.hpp>
#include <tessera/exec/space.hpp>
#include <tessera/ops/elementary.hpp>
#include <tessera/ops/shapes.hpp>

namespace tessera::inline TESSERA_ABI::ops {

struct dropout_options {
  float probability = 0;       ///< Of an element to be dropped, in [0, 1].
  std::uint64_t seed = 0;      ///< Of the run.
  std::uint64_t step = 0;      ///< Optimizer step, below 2^48.
  std::uint64_t layer = 0;     ///< Which dropout of the model, below 2^16.
  index_t first_sample = 0;    ///< Number of the first row's sample within the step's global batch.
  index_t rows_per_sample = 1; ///< Rows (tokens) of one sample.
};

/// The mask of a call. Element (row, column) has the index (first_sample * rows_per_sample + row) * width +
/// column.
struct dropout_mask {
  philox random;
  std::uint64_t first_index;
  float probability, scale;

  TESSERA_HOST_DEVICE dropout_mask(dropout_options const& options, index_t width) noexcept
      : random(options.seed, (options.layer << 48 ^ options.step) ^ 0x64726f706f757421u),
        first_index(static_cast<std::uint64_t>(options.first_sample * options.rows_per_sample * width)),
        probability(options.probability), scale(1.0f / (1.0f - options.probability)) {}

  /// x scaled, or zero: `bits` are those of the element, random.bits(first_index + its place in the call).
  [[gnu::always_inline]] TESSERA_HOST_DEVICE float apply(float x, std::uint32_t bits) const noexcept {
    return elementary::select(philox::unit_interval(bits) < probability, 0.0f, x * scale);
  }
};

/// One implementation a backend: `run(ex, out, residual, in, mask)` over flat views; residual may be empty.
template <class Backend>
struct dropout_on;

namespace detail {

template <exec::space Ex, storage_scalar T>
void dropout(char const* name, Ex& ex, view<T, 2, typename Ex::memory> out,
             view<T const, 2, typename Ex::memory> residual, view<T const, 2, typename Ex::memory> in,
             dropout_options const& options, site where) {
  require_extents(name, "out", out, in.extents(), where);
  require_extents_or_none(name, "residual", residual, in.extents(), where);
  require_contiguous(name, "out", out, where);
  require_contiguous(name, "residual", residual, where);
  require_contiguous(name, "in", in, where);
  if (!(options.probability >= 0 && options.probability <= 1))
    throw config_error("E-ops-012", where, name, ": probability is ", options.probability,
                       ", must lie in [0, 1]");
  if (options.first_sample < 0 || options.rows_per_sample < 1 || options.step >> 48 != 0 ||
      options.layer >> 16 != 0)
    throw size_error("E-ops-013", where, name, ": first_sample ", options.first_sample,
                     " must not be negative, rows_per_sample ", options.rows_per_sample,
                     " must be positive, step ", options.step, " below 2^48 and layer ", options.layer,
                     " below 2^16");
  dropout_on<typename Ex::backend>::run(ex, out, residual, in, dropout_mask(options, in.extent(1)));
}

} // namespace detail

/// out = dropout(in), [rows, width], contiguous; out may be in. Throws size_error, or config_error for an
/// impossible probability.
template <exec::space Ex, storage_scalar T>
void dropout(Ex& ex, view<T, 2, typename Ex::memory> out, input<T, 2, typename Ex::memory> in,
             dropout_options const& options, site where = site::here()) {
  detail::dropout("dropout", ex, out, view<T const, 2, typename Ex::memory>{}, in, options, where);
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
