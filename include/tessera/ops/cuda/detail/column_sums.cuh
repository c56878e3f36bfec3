/// Sums over the rows of a matrix, one for each column, in an order that depends on the number of rows alone:
/// the bias gradient of a linear layer, and on the same pass the gradient before its activation.
#ifndef TESSERA_OPS_CUDA_DETAIL_COLUMN_SUMS_CUH
#define TESSERA_OPS_CUDA_DETAIL_COLUMN_SUMS_CUH

#include <tessera/exec/launch.cuh>
#include <tessera/exec/pack.cuh>
#include <tessera/exec/scratch.hpp>
#include <tessera/ops/cuda/detail/partial_sums.cuh>

namespace tessera::inline TESSERA_ABI::ops::cuda_detail {

using exec::cuda_memory;

inline constexpr int column_lanes = 32;    // threads across, a pack of columns each
inline constexpr int column_rows = 8;      // threads down
inline constexpr index_t split_rows = 128; // rows whose sum is one partial sum

/// What is summed: the elements of `in`, or, where `Slope` has a slope, in * slope(before), which also goes
/// to `out`.
template <storage_scalar T>
struct column_source {
  T const* in;
  index_t in_stride;
  T const* before = nullptr;
  index_t before_stride = 0;
  T* out = nullptr;
  index_t out_stride = 0;
  bool aligned = false; ///< All of them, in every row.
};

/// Sums as they are.
struct no_slope {};

template <class Slope, storage_scalar T>
TESSERA_KERNEL void __launch_bounds__(column_lanes* column_rows)
    column_parts_kernel(float* parts, column_source<T> source, Slope slope, index_t rows, index_t columns) {
  constexpr int n = exec::pack_size<T>;
  __shared__ float sums[column_rows][n][column_lanes];
  auto const lane = static_cast<int>(threadIdx.x), down = static_cast<int>(threadIdx.y);
  auto const column = (index_t{blockIdx.x} * column_lanes + lane) * n;
  auto const count = columns - column;
  auto const end = (index_t{blockIdx.y} + 1) * split_rows;
  float sum[n] = {};
  if (count > 0)
    for (auto row = index_t{blockIdx.y} * split_rows + down; row < (end < rows ? end : rows);
         row += column_rows) {
      float value[n];
      exec::load_part(value, source.in + row * source.in_stride + column, count, source.aligned);
      if constexpr (!std::same_as<Slope, no_slope>) {
        float before[n];
        exec::load_part(before, source.before + row * source.before_stride + column, count, source.aligned);
#pragma unroll
        for (int i = 0; i < n; ++i) value[i] *= slope(before[i]);
        exec::store_part(source.out + row * source.out_stride + column, value, count, source.aligned);
      }
#pragma unroll
      for (int i = 0; i < n; ++i) sum[i] += value[i];
    }
#pragma unroll
  for (int i = 0; i < n; ++i) sums[down][i][lane] = sum[i];
  __syncthreads();
  if (down != 0) return;
#pragma unroll
  for (int i = 0; i < n; ++i) {
    for (int other = 1; other < column_rows; ++other) sum[i] += sums[other][i][lane];
    if (i < count) parts[index_t{blockIdx.y} * columns + column + i] = sum[i];
  }
}

/// sums[columns] (+)= the columns of source[rows, columns].
template <exec::cuda_space Ex, storage_scalar G, storage_scalar T, class Slope>
void column_sums(Ex& ex, G* sums, column_source<T> source, Slope slope, index_t rows, index_t columns,
                 bool accumulate, site where) {
  constexpr index_t across = column_lanes * exec::pack_size<T>;
  auto const splits = (rows + split_rows - 1) / split_rows;
  auto* parts = ex.template handle<exec::scratch<column_source<float>, cuda_memory>>().template take<float>(
      splits * columns, where);
  exec::launch(ex,
               {.grid = exec::grid_of((columns + across - 1) / across, splits),
                .block = dim3(column_lanes, column_rows),
                .where = where},
               column_parts_kernel<Slope, T>, parts, source, slope, rows, columns);
  add_partials(ex, partial_outputs<G, 1>{{sums}}, parts, splits, columns, accumulate, where);
}

} // namespace tessera::inline TESSERA_ABI::ops::cuda_detail

#endif
