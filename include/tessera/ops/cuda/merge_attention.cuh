/// merge_attention on CUDA: a warp for each row of each head, in accesses of 16 bytes where all rows begin at
/// such a boundary.
#ifndef TESSERA_OPS_CUDA_MERGE_ATTENTION_CUH
#define TESSERA_OPS_CUDA_MERGE_ATTENTION_CUH

#include <tessera/exec/launch.cuh>
#include <tessera/exec/pack.cuh>
#include <tessera/ops/merge_attention.hpp>

namespace tessera::inline TESSERA_ABI::ops {

namespace cuda_detail {

inline constexpr int merge_lanes = 32, merge_rows = 8;

template <int N, storage_scalar T>
TESSERA_KERNEL void __launch_bounds__(merge_lanes* merge_rows)
    merge_attention_kernel(view<float, 4, exec::cuda_memory> out,
                           view<float, 3, exec::cuda_memory> log_sum_exp,
                           view<T const, 4, exec::cuda_memory> part,
                           view<float const, 3, exec::cuda_memory> part_log_sum_exp) {
  auto const tokens = out.extent(1), heads = out.extent(2), rows = out.extent(0) * tokens * heads;
  auto const packs = out.extent(3) / N;
  for (auto row = index_t{blockIdx.x} * merge_rows + threadIdx.y; row < rows;
       row += index_t{gridDim.x} * merge_rows) {
    auto const b = row / heads / tokens, t = row / heads % tokens, h = row % heads;
    auto* const sum = log_sum_exp.address(b, h, t);
    merge_factors const f(*sum, *part_log_sum_exp.address(b, h, t));
    __syncwarp(); // all lanes have read it
    if (threadIdx.x == 0) *sum = f.log_sum_exp;
    if (f.of_part == 0) continue;
    auto* y = out.address(b, t, h, 0);
    auto const* x = part.address(b, t, h, 0);
    for (auto p = index_t{threadIdx.x}; p < packs; p += merge_lanes) {
      float more[N], whole[N] = {};
      exec::load_pack(more, x + p * N);
      if (f.of_out != 0) exec::load_pack(whole, y + p * N);
#pragma unroll
      for (int i = 0; i < N; ++i) whole[i] = f.of_out * whole[i] + f.of_part * more[i];
      exec::store_pack(y + p * N, whole);
    }
  }
}

} // namespace cuda_detail

template <>
struct merge_attention_on<exec::cuda_backend> {
  template <exec::cuda_space Ex, storage_scalar T>
  static void run(Ex& ex, view<float, 4, exec::cuda_memory> out,
                  view<float, 3, exec::cuda_memory> log_sum_exp, view<T const, 4, exec::cuda_memory> part,
                  view<float const, 3, exec::cuda_memory> part_log_sum_exp) {
    using namespace cuda_detail;
    constexpr int n = exec::pack_size<T>;
    auto whole = out.extent(3) % n == 0;
    for (int d = 0; d < 3; ++d)
      whole =
          whole && exec::aligned16(out.data(), out.stride(d)) && exec::aligned16(part.data(), part.stride(d));
    exec::launch(ex,
                 {.grid = exec::grid_for(ex, out.extent(0) * out.extent(1) * out.extent(2), merge_rows),
                  .block = dim3(merge_lanes, merge_rows)},
                 whole ? merge_attention_kernel<n, T> : merge_attention_kernel<1, T>, out, log_sum_exp, part,
                 part_log_sum_exp);
  }
};

} // namespace tessera::inline TESSERA_ABI::ops

#endif
