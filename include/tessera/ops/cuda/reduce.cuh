/// Sums on CUDA: blocks add up their share, the host adds their results in order. Which element goes where
/// depends on the count alone, so that the same values give the same bits wherever they lie and on any
/// device. Waits for the result.
#ifndef TESSERA_OPS_CUDA_REDUCE_CUH
#define TESSERA_OPS_CUDA_REDUCE_CUH

#include <array>

#include <cub/block/block_reduce.cuh>

#include <tessera/exec/copy_cuda.hpp>
#include <tessera/exec/launch.cuh>
#include <tessera/exec/pack.cuh>
#include <tessera/exec/scratch.hpp>
#include <tessera/ops/reduce.hpp>

namespace tessera::inline TESSERA_ABI::ops {

namespace cuda_detail {

inline constexpr int reduce_threads = 256, reduce_blocks = 1024;

/// partial[block] = the sum of term(x) over every x of the block. term(0) is 0.
template <storage_scalar T, class Term>
TESSERA_KERNEL void __launch_bounds__(reduce_threads)
    reduce_kernel(double* partial, T const* in, index_t count, bool aligned, Term term) {
  constexpr int n = exec::pack_size<T>;
  auto const step = index_t{gridDim.x} * reduce_threads * n;
  auto i = (index_t{blockIdx.x} * reduce_threads + threadIdx.x) * n;
  auto sum = 0.0;
  float x[n];
  if (aligned)
#pragma unroll 4
    for (; i + n <= count; i += step) {
      exec::load_pack(x, in + i);
      for (int e = 0; e < n; ++e) sum += term(x[e]);
    }
  for (; i < count; i += step) {
    exec::load_part(x, in + i, count - i, false);
    for (int e = 0; e < n; ++e) sum += term(x[e]);
  }
  using block = cub::BlockReduce<double, reduce_threads>;
  __shared__ typename block::TempStorage storage;
  auto const total = block(storage).Sum(sum);
  if (threadIdx.x == 0) partial[blockIdx.x] = total;
}

} // namespace cuda_detail

template <>
struct reduce_on<exec::cuda_backend> {
  template <exec::cuda_space Ex, storage_scalar T, class Term>
  static double sum(Ex& ex, view<T const, 1, typename Ex::memory> in, Term term, site where) {
    using namespace cuda_detail;
    constexpr index_t share = index_t{reduce_threads} * exec::pack_size<T>;
    auto const blocks = (std::min)((in.size() + share - 1) / share, index_t{reduce_blocks});
    auto& scratch = ex.template handle<exec::scratch<reduce_on, typename Ex::memory>>();
    auto* partial = scratch.template take<double>(reduce_blocks, where);
    exec::launch(ex, {.grid = exec::grid_of(blocks), .block = dim3(reduce_threads), .where = where},
                 reduce_kernel<T, Term>, partial, in.data(), in.size(), exec::aligned16(in.data()), term);

    std::array<double, reduce_blocks> results;
    auto const count = static_cast<std::size_t>(blocks);
    exec::copy(ex, std::span<double>(results.data(), count),
               memory_span<double const, typename Ex::memory>(partial, count), where);
    auto total = 0.0;
    for (std::size_t b = 0; b < count; ++b) total += results[b];
    return total;
  }
};

} // namespace tessera::inline TESSERA_ABI::ops

#endif
