/// Copies and sums of arrays of rows that lie anywhere: four extents, the last of them a row of adjacent
/// elements, the others at any stride (slices of a packed tensor, some heads, some tokens). Storage is
/// converted on the way, rounded once. What messages are packed with, and what partial gradients are added
/// up by.
///
///     ops::copy_rows(ex, packed, k.slice(2, 0, heads));    // [B, T, H, D]
///     ops::add_rows(ex, sum, part);                        // sum, in fp32, += part
///
/// The two arrays do not overlap. Cost: one read and one write an element (add_rows two reads).
#ifndef TESSERA_OPS_COPY_ROWS_HPP
#define TESSERA_OPS_COPY_ROWS_HPP

#include <tessera/core/scalar.hpp>
#include <tessera/exec/space.hpp>
#include <tessera/ops/shapes.hpp>

namespace tessera::inline TESSERA_ABI::ops {

/// One implementation a backend: `run<Adds>(ex, out, in)`.
template <class Backend>
struct copy_rows_on;

/// out = in. Throws size_error where extents differ or rows have gaps.
template <exec::space Ex, storage_scalar To, class From>
  requires storage_scalar<std::remove_const_t<From>>
void copy_rows(Ex& ex, view<To, 4, typename Ex::memory> out, view<From, 4, typename Ex::memory> in,
               site where = site::here()) {
  require_dense_rows("copy_rows", "out", out, where);
  require_rows("copy_rows", "in", in, out.extents(), where);
  copy_rows_on<typename Ex::backend>::template run<false>(
      ex, out, view<std::remove_const_t<From> const, 4, typename Ex::memory>(in));
}

/// sum += in, in fp32.
template <exec::space Ex, class From>
  requires storage_scalar<std::remove_const_t<From>>
void add_rows(Ex& ex, view<float, 4, typename Ex::memory> sum, view<From, 4, typename Ex::memory> in,
              site where = site::here()) {
  require_dense_rows("add_rows", "sum", sum, where);
  require_rows("add_rows", "in", in, sum.extents(), where);
  copy_rows_on<typename Ex::backend>::template run<true>(
      ex, sum, view<std::remove_const_t<From> const, 4, typename Ex::memory>(in));
}

} // namespace tessera::inline TESSERA_ABI::ops

#include <tessera/ops/host/copy_rows.hpp>

#endif
