/// copy_rows and add_rows on CUDA: one pass, in accesses of 16 bytes where all rows begin at such a boundary.
#ifndef TESSERA_OPS_CUDA_COPY_ROWS_CUH
#define TESSERA_OPS_CUDA_COPY_ROWS_CUH

#include <tessera/exec/launch.cuh>
#include <tessera/exec/pack.cuh>
#include <tessera/ops/copy_rows.hpp>
#include <tessera/ops/detail/row_places.hpp>

namespace tessera::inline TESSERA_ABI::ops {

namespace cuda_detail {

inline constexpr int copy_rows_threads = 256;

/// N elements at a time: a thread's column of packs over the rows that its block comes by.
template <int N, bool Adds, storage_scalar To, storage_scalar From>
TESSERA_KERNEL void __launch_bounds__(copy_rows_threads)
    copy_rows_kernel(detail::row_places<To, From const> places) {
  auto const packs = places.width / N;
  for (auto row = index_t{blockIdx.y} * blockDim.y + threadIdx.y; row < places.rows;
       row += index_t{gridDim.y} * blockDim.y) {
    auto* to = places.to_row(row);
    auto const* from = places.from_row(row);
    for (auto p = index_t{blockIdx.x} * blockDim.x + threadIdx.x; p < packs;
         p += index_t{gridDim.x} * blockDim.x) {
      float x[N];
      exec::load_pack(x, from + p * N);
      if constexpr (Adds) {
        float sum[N];
        exec::load_pack(sum, to + p * N);
#pragma unroll
        for (int i = 0; i < N; ++i) x[i] += sum[i];
      }
      exec::store_pack(to + p * N, x);
    }
  }
}

} // namespace cuda_detail

template <>
struct copy_rows_on<exec::cuda_backend> {
  template <bool Adds, exec::cuda_space Ex, storage_scalar To, storage_scalar From>
  static void run(Ex& ex, view<To, 4, exec::cuda_memory> out, view<From const, 4, exec::cuda_memory> in) {
    if (out.empty()) return;
    using namespace cuda_detail;
    detail::row_places const places(out, in);
    constexpr int n = exec::pack_size<To, From>;
    auto whole = places.width % n == 0;
    for (int d = 0; d < 3; ++d)
      whole = whole && exec::aligned16(places.to, places.to_stride[d]) &&
              exec::aligned16(places.from, places.from_stride[d]);
    auto const packs = whole ? places.width / n : places.width;
    index_t across = 1; // threads along a row; short rows share a block
    while (across < copy_rows_threads && across < packs) across *= 2;
    auto const down = copy_rows_threads / across;
    constexpr index_t most_down = 65535; // the kernel loops over the rest
    auto const blocks = (places.rows + down - 1) / down;
    exec::launch(
        ex,
        {.grid = exec::grid_of((packs + across - 1) / across, blocks < most_down ? blocks : most_down),
         .block = exec::grid_of(across, down)},
        whole ? copy_rows_kernel<n, Adds, To, From> : copy_rows_kernel<1, Adds, To, From>, places);
  }
};

} // namespace tessera::inline TESSERA_ABI::ops

#endif
