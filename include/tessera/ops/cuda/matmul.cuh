/// Matrix products on CUDA, by cuBLASLt. It multiplies operands of one type into that type or fp32. Where
/// they differ, or lie in memory as no leading dimension can say, they are first copied into fp32 or dense
/// scratch memory; a 16-bit result of other operands is made in fp32 and rounded once.
#ifndef TESSERA_OPS_CUDA_MATMUL_CUH
#define TESSERA_OPS_CUDA_MATMUL_CUH

#include <tessera/exec/launch.cuh>
#include <tessera/ops/cuda/detail/cublaslt.hpp>
#include <tessera/ops/matmul.hpp>

namespace tessera::inline TESSERA_ABI::ops {

namespace cuda_detail {

inline constexpr int copy_threads = 256;

/// to = from, or to += from; any strides, element by element: not a path that anything fast takes.
template <storage_scalar To, storage_scalar From>
TESSERA_KERNEL void __launch_bounds__(copy_threads)
    copy_kernel(view<To, 3, cuda_memory> to, view<From const, 3, cuda_memory> from, bool accumulate) {
  auto const rows = to.extent(1), columns = to.extent(2), count = to.size();
  for (auto i = index_t{blockIdx.x} * blockDim.x + threadIdx.x; i < count;
       i += index_t{gridDim.x} * blockDim.x) {
    auto const row = i / columns, batch = row / rows;
    auto& place = *to.address(batch, row % rows, i % columns);
    auto const value = static_cast<float>(*from.address(batch, row % rows, i % columns));
    place = To(accumulate ? static_cast<float>(place) + value : value);
  }
}

template <storage_scalar T>
TESSERA_KERNEL void __launch_bounds__(copy_threads) clear_kernel(view<T, 3, cuda_memory> to) {
  auto const rows = to.extent(1), columns = to.extent(2), count = to.size();
  for (auto i = index_t{blockIdx.x} * blockDim.x + threadIdx.x; i < count;
       i += index_t{gridDim.x} * blockDim.x)
    *to.address(i / columns / rows, i / columns % rows, i % columns) = T(0.0f);
}

template <exec::cuda_space Ex, storage_scalar To, storage_scalar From>
void copy_matrices(Ex& ex, view<To, 3, cuda_memory> to, view<From const, 3, cuda_memory> from,
                   bool accumulate, site where) {
  exec::launch(
      ex, {.grid = exec::grid_for(ex, to.size(), copy_threads), .block = dim3(copy_threads), .where = where},
      copy_kernel<To, From>, to, from, accumulate);
}

template <exec::cuda_space Ex, storage_scalar T>
void clear_matrices(Ex& ex, view<T, 3, cuda_memory> to, site where) {
  exec::launch(
      ex, {.grid = exec::grid_for(ex, to.size(), copy_threads), .block = dim3(copy_threads), .where = where},
      clear_kernel<T>, to);
}

/// The operand, or a dense copy of it where its type or its layout is none that cuBLASLt takes.
template <class Tag, storage_scalar To, exec::cuda_space Ex, storage_scalar From>
view<To const, 3, cuda_memory> operand_as(Ex& ex, view<From const, 3, cuda_memory> given, site where) {
  if constexpr (std::same_as<To, From>)
    if (layout_of(given)) return given;
  view<To, 3, cuda_memory> const copy(
      ex.template handle<exec::scratch<Tag, cuda_memory>>().template take<To>(given.size(), where),
      given.extents());
  copy_matrices(ex, copy, given, false, where);
  return copy;
}

} // namespace cuda_detail

template <>
struct matmul_on<exec::cuda_backend> {
  template <exec::cuda_space Ex, storage_scalar C, storage_scalar A, storage_scalar B>
  static void run(Ex& ex, view<C, 2, exec::cuda_memory> c, view<A const, 2, exec::cuda_memory> a,
                  view<B const, 2, exec::cuda_memory> b, bool accumulate, site where = site::here()) {
    using cuda_detail::batch_of_one;
    run_batched(ex, batch_of_one(c), batch_of_one(a), batch_of_one(b), accumulate, where);
  }

  template <exec::cuda_space Ex, storage_scalar C, storage_scalar A, storage_scalar B>
  static void run_batched(Ex& ex, view<C, 3, exec::cuda_memory> c, view<A const, 3, exec::cuda_memory> a,
                          view<B const, 3, exec::cuda_memory> b, bool accumulate, site where) {
    using namespace cuda_detail;
    using operand = std::conditional_t<std::same_as<A, B>, A, float>;
    if (c.empty()) return;
    if (a.extent(2) == 0) { // sums of nothing
      if (!accumulate) clear_matrices(ex, c, where);
      return;
    }
    auto const left = operand_as<left_copy, operand>(ex, a, where);
    auto const right = operand_as<right_copy, operand>(ex, b, where);
    auto& library = ex.template handle<cublaslt>();
    if constexpr (std::same_as<C, operand> || std::same_as<C, float>)
      if (is_target(c)) {
        if (!library.multiply(ex, c, left, right, accumulate, {}, where)) refuse(c, left, where);
        return;
      }
    view<float, 3, cuda_memory> const sums(
        ex.template handle<exec::scratch<result_copy, cuda_memory>>().template take<float>(c.size(), where),
        c.extents());
    if (!library.multiply(ex, sums, left, right, false, {}, where)) refuse(c, left, where);
    copy_matrices(ex, c, view<float const, 3, cuda_memory>(sums), accumulate, where);
  }

private:
  struct left_copy;
  struct right_copy;
  struct result_copy;

  /// Whether cuBLASLt can write it: rows apart, matrices apart.
  template <storage_scalar C>
  static bool is_target(view<C, 3, exec::cuda_memory> c) {
    auto const layout = cuda_detail::layout_of(c);
    return layout && !layout->columns && (c.extent(0) == 1 || layout->next >= c.extent(1) * layout->leading);
  }

  template <storage_scalar C, storage_scalar T>
  [[noreturn]] static void refuse(view<C, 3, exec::cuda_memory> c, view<T const, 3, exec::cuda_memory> a,
                                  site where) {
    throw library_error("E-ops-107", where, "cuBLASLt has no algorithm for products of extents ",
                        text_of(c.extents()), " over ", a.extent(2), " elements of ", scalar_name<T>());
  }
};

} // namespace tessera::inline TESSERA_ABI::ops

#endif
