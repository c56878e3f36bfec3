/// Sums over the rows of fp32 partial results, in fixed order: how gradients of what all rows share (the gain
/// and bias of a norm) are finished.
#ifndef TESSERA_OPS_CUDA_DETAIL_PARTIAL_SUMS_CUH
#define TESSERA_OPS_CUDA_DETAIL_PARTIAL_SUMS_CUH

#include <tessera/exec/launch.cuh>

namespace tessera::inline TESSERA_ABI::ops::cuda_detail {

inline constexpr int partial_columns = 32, partial_lanes = 32;

/// One block for 32 columns: thread (x, y) adds up the rows y, y + 32, ... of column x, then the first row of
/// threads adds their results in order. Block row k serves the output k, whose partial results start
/// k * width elements into each row.
template <storage_scalar G, int Outputs>
struct partial_outputs {
  G* out[Outputs];
};

template <storage_scalar G, int Outputs>
TESSERA_KERNEL void __launch_bounds__(partial_columns* partial_lanes)
    partial_sum_kernel(partial_outputs<G, Outputs> outputs, float const* partial, index_t rows, index_t width,
                       bool accumulate) {
  __shared__ float sums[partial_lanes][partial_columns];
  auto const column = index_t{blockIdx.x} * partial_columns + threadIdx.x;
  auto const* from = partial + blockIdx.y * width + column;
  auto sum = 0.0f;
  if (column < width)
    for (index_t row = threadIdx.y; row < rows; row += partial_lanes) sum += from[row * Outputs * width];
  sums[threadIdx.y][threadIdx.x] = sum;
  __syncthreads();
  if (threadIdx.y > 0 || column >= width) return;
  auto* out = outputs.out[0];
#pragma unroll
  for (unsigned k = 1; k < Outputs; ++k)
    if (blockIdx.y == k) out = outputs.out[k];
  auto total = accumulate ? static_cast<float>(out[column]) : 0.0f;
  for (int lane = 0; lane < partial_lanes; ++lane) total += sums[lane][threadIdx.x];
  out[column] = G(total);
}

/// outputs.out[k][i] (+)= the sum over r of partial[(r * Outputs + k) * width + i].
template <exec::cuda_space Ex, storage_scalar G, int Outputs>
void add_partials(Ex& ex, partial_outputs<G, Outputs> outputs, float const* partial, index_t rows,
                  index_t width, bool accumulate, site where) {
  exec::launch(ex,
               {.grid = exec::grid_of((width + partial_columns - 1) / partial_columns, Outputs),
                .block = dim3(partial_columns, partial_lanes),
                .where = where},
               partial_sum_kernel<G, Outputs>, outputs, partial, rows, width, accumulate);
}

} // namespace tessera::inline TESSERA_ABI::ops::cuda_detail

#endif
