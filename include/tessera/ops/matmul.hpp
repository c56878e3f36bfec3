/// Matrix products: c = op(a) op(b), or c += op(a) op(b), where op may transpose. Sums are made in fp32
/// whatever the storage types are, and rounded once.
///
///     ops::matmul(ex, c, a, b);                            // c[m, n] = a[m, k] b[k, n]
///     ops::matmul(ex, c, a, b, {.transpose_b = true});     // c[m, n] = a[m, k] b[n, k]^T
///
/// Cost: 2 m n k operations; see exec::host for who does them there. On CUDA cuBLASLt does, one call for a
/// whole batch; operands of different types are first widened to fp32 in scratch memory.
#ifndef TESSERA_OPS_MATMUL_HPP
#define TESSERA_OPS_MATMUL_HPP

#include <utility>

#include <tessera/core/scalar.hpp>
#include <tessera/exec/space.hpp>
#include <tessera/ops/shapes.hpp>

namespace tessera::inline TESSERA_ABI::ops {

struct matmul_options {
  bool transpose_a = false; ///< a is given as [k, m].
  bool transpose_b = false; ///< b is given as [n, k].
  bool accumulate = false;  ///< Add to c instead of overwriting it.
};

/// What stands in an operand: a storage type, constant or not.
template <class T>
concept matrix_scalar = storage_scalar<std::remove_const_t<T>>;

/// The backends' products, over operands that are already transposed (their strides are swapped):
/// `run(ex, c, a, b, accumulate, where)` and, over views of rank 3, `run_batched` with the same arguments.
template <class Backend>
struct matmul_on;

namespace detail {

/// The matrix, or the batch of matrices, as the product reads it. Throws size_error where elements of a row
/// are not adjacent.
template <matrix_scalar T, int Rank, memory_space M>
view<T const, Rank, M> product_operand(view<T, Rank, M> given, bool transpose, char const* name, site where) {
  require_dense_rows("matmul", name, given, where);
  constexpr auto row = static_cast<std::size_t>(Rank - 2), column = row + 1;
  auto sizes = given.extents(), strides = given.strides();
  strides[column] = 1; // whatever it is where rows have one element
  if (transpose) {
    std::swap(sizes[row], sizes[column]);
    std::swap(strides[row], strides[column]);
  }
  return {given.data(), sizes, strides};
}

template <storage_scalar C, int Rank, memory_space M, matrix_scalar A, matrix_scalar B>
void check_product(view<C, Rank, M> c, view<A, Rank, M> a, view<B, Rank, M> b, site where) {
  constexpr auto row = Rank - 2, column = Rank - 1;
  require_dense_rows("matmul", "c", c, where);
  if (a.extent(row) != c.extent(row) || b.extent(column) != c.extent(column) ||
      a.extent(column) != b.extent(row))
    throw size_error("E-ops-101", where, "matmul: c is ", text_of(c.extents()), ", after transposition a is ",
                     text_of(a.extents()), " and b is ", text_of(b.extents()),
                     "; need c[m, n], a[m, k], b[k, n]");
}

} // namespace detail

/// c[m, n] (+)= op(a)[m, k] op(b)[k, n]. Rows may be further apart than their length; c overlaps neither a
/// nor b. Any mixture of storage types. Throws size_error for extents that do not fit (k = 0 gives zeros).
template <exec::space Ex, storage_scalar C, matrix_scalar A, matrix_scalar B>
void matmul(Ex& ex, view<C, 2, typename Ex::memory> c, view<A, 2, typename Ex::memory> a,
            view<B, 2, typename Ex::memory> b, matmul_options options = {}, site where = site::here()) {
  auto const left = detail::product_operand(a, options.transpose_a, "a", where);
  auto const right = detail::product_operand(b, options.transpose_b, "b", where);
  detail::check_product(c, left, right, where);
  if (!c.empty()) matmul_on<typename Ex::backend>::run(ex, c, left, right, options.accumulate, where);
}

/// The same for each index of the outermost dimension: c[i] (+)= op(a[i]) op(b[i]).
template <exec::space Ex, storage_scalar C, matrix_scalar A, matrix_scalar B>
void matmul_batched(Ex& ex, view<C, 3, typename Ex::memory> c, view<A, 3, typename Ex::memory> a,
                    view<B, 3, typename Ex::memory> b, matmul_options options = {},
                    site where = site::here()) {
  if (a.extent(0) != c.extent(0) || b.extent(0) != c.extent(0))
    throw size_error("E-ops-102", where, "matmul_batched: c has ", c.extent(0), " matrices, a ", a.extent(0),
                     ", b ", b.extent(0));
  if (c.extent(0) == 0) return;
  auto const left = detail::product_operand(a, options.transpose_a, "a", where);
  auto const right = detail::product_operand(b, options.transpose_b, "b", where);
  detail::check_product(c, left, right, where);
  if (!c.empty()) matmul_on<typename Ex::backend>::run_batched(ex, c, left, right, options.accumulate, where);
}

} // namespace tessera::inline TESSERA_ABI::ops

#include <tessera/ops/host/matmul.hpp>

#endif
