/// embedding on CUDA. The backward sorts the rows by token (a stable radix sort), so that each row of the
/// table is summed in float, in the order of the tokens, and written once.
#ifndef TESSERA_OPS_CUDA_EMBEDDING_CUH
#define TESSERA_OPS_CUDA_EMBEDDING_CUH

#include <cub/device/device_radix_sort.cuh>

#include <tessera/exec/pack.cuh>
#include <tessera/exec/scratch.hpp>
#include <tessera/ops/cuda/detail/faults.cuh>
#include <tessera/ops/embedding.hpp>

namespace tessera::inline TESSERA_ABI::ops {

namespace cuda_detail {

inline constexpr int embedding_lanes = 32, embedding_rows = 8; ///< A warp takes a row.

/// Rows of a matrix, for kernels that read or write packs of them.
template <class T>
struct matrix_rows {
  T* data;
  index_t stride;
  bool aligned; ///< Every row begins at a boundary of 16 bytes.

  explicit matrix_rows(view<T, 2, cuda_memory> matrix) noexcept
      : data(matrix.data()), stride(matrix.stride(0)),
        aligned(exec::aligned16(matrix.data(), matrix.stride(0))) {}
  __device__ T* at(index_t row, index_t column) const { return data + row * stride + column; }
};

template <storage_scalar T, storage_scalar Table>
TESSERA_KERNEL void __launch_bounds__(embedding_lanes* embedding_rows)
    embedding_kernel(matrix_rows<T> out, view<std::int32_t const, 2, cuda_memory> tokens,
                     matrix_rows<Table const> table, detail::vocabulary_slice slice,
                     matrix_rows<Table const> positions, token_positions places, index_t width,
                     fault_flag flag) {
  constexpr int n = exec::pack_size<T, Table>;
  auto const row = index_t{blockIdx.x} * embedding_rows + threadIdx.y;
  if (row >= tokens.size()) return;
  auto const t = row % tokens.extent(1);
  auto const token = *tokens.address(row / tokens.extent(1), t);
  auto const known = slice.known(token);
  auto const at = slice.place_of(token);
  if (!known && threadIdx.x == 0) flag.raise(row, token);
  // What a token of another slice embeds to, and what is none: NaN.
  auto const elsewhere = known ? 0.0f : std::bit_cast<float>(0x7fc00000u);
  for (auto column = index_t{threadIdx.x} * n; column < width; column += embedding_lanes * n) {
    auto const count = width - column;
    float value[n];
#pragma unroll
    for (int i = 0; i < n; ++i) value[i] = elsewhere;
    if (at >= 0) exec::load_part(value, table.at(at, column), count, table.aligned);
    if (positions.data != nullptr) {
      float position[n];
      exec::load_part(position, positions.at(places(t), column), count, positions.aligned);
#pragma unroll
      for (int i = 0; i < n; ++i) value[i] += position[i];
    }
    exec::store_part(out.at(row, column), value, count, out.aligned);
  }
}

/// What is sorted: each row's token, counted from the slice's first (`classes` for one outside), and its
/// number.
template <std::unsigned_integral Key>
TESSERA_KERNEL void __launch_bounds__(256)
    token_keys_kernel(Key* keys, std::int32_t* rows, view<std::int32_t const, 2, cuda_memory> tokens,
                      detail::vocabulary_slice slice, fault_flag flag) {
  auto const row = index_t{blockIdx.x} * blockDim.x + threadIdx.x;
  if (row >= tokens.size()) return;
  auto const token = *tokens.address(row / tokens.extent(1), row % tokens.extent(1));
  if (!slice.known(token)) flag.raise(row, token);
  auto const at = slice.place_of(token);
  keys[row] = static_cast<Key>(at >= 0 ? at : slice.size);
  rows[row] = static_cast<std::int32_t>(row);
}

/// first[v] = the number of sorted keys below v, for v in [0, classes].
template <std::unsigned_integral Key>
TESSERA_KERNEL void __launch_bounds__(256)
    token_starts_kernel(std::int32_t* first, Key const* keys, std::int32_t count, Key classes) {
  auto const v = blockIdx.x * blockDim.x + threadIdx.x;
  if (v > classes) return;
  std::int32_t low = 0, high = count;
  while (low < high) {
    auto const middle = low + (high - low) / 2;
    if (keys[middle] < v)
      low = middle + 1;
    else
      high = middle;
  }
  first[v] = low;
}

/// Which rows of the gradient belong to a row of the table: those of its token.
struct rows_of_token {
  std::int32_t const* first;
  std::int32_t const* rows;

  struct list {
    std::int32_t const* rows;
    index_t begin, end;
    __device__ index_t row(index_t k) const { return rows[k]; }
  };
  __device__ list of(index_t token) const { return {rows, first[token], first[token + 1]}; }
};

/// Those of its position, one of each sample.
struct rows_of_position {
  index_t samples, length;
  token_positions places;

  struct list {
    index_t length, token, begin, end;
    __device__ index_t row(index_t k) const { return k * length + token; }
  };
  __device__ list of(index_t position) const {
    auto const token = places.token_at(position, length);
    return {length, token, 0, token >= 0 ? samples : 0};
  }
};

/// out[i] (+)= the sum of its rows of `in`, in their order: a warp for each i and each 32 packs of columns.
template <storage_scalar G, storage_scalar T, class Rows>
TESSERA_KERNEL void __launch_bounds__(embedding_lanes* embedding_rows)
    row_sums_kernel(matrix_rows<G> out, matrix_rows<T const> in, Rows rows, index_t count, index_t width,
                    bool accumulate) {
  constexpr int n = exec::pack_size<G, T>;
  auto const i = index_t{blockIdx.x} * embedding_rows + threadIdx.y;
  auto const column = (index_t{blockIdx.y} * embedding_lanes + threadIdx.x) * n;
  auto const left = width - column;
  if (i >= count || left <= 0) return;
  auto const mine = rows.of(i);
  if (mine.begin == mine.end && accumulate) return;
  float sum[n] = {};
  if (accumulate) exec::load_part(sum, out.at(i, column), left, out.aligned);
#pragma unroll 2
  for (auto k = mine.begin; k < mine.end; ++k) {
    float value[n];
    exec::load_part(value, in.at(mine.row(k), column), left, in.aligned);
#pragma unroll
    for (int j = 0; j < n; ++j) sum[j] += value[j];
  }
  exec::store_part(out.at(i, column), sum, left, out.aligned);
}

} // namespace cuda_detail

template <>
struct embedding_on<exec::cuda_backend> {
  template <class T, int Rank>
  using device_view = view<T, Rank, exec::cuda_memory>;

  template <exec::cuda_space Ex, storage_scalar T, storage_scalar Table>
  static void forward(Ex& ex, device_view<T, 2> out, device_view<std::int32_t const, 2> tokens,
                      device_view<Table const, 2> table, detail::vocabulary_slice slice,
                      device_view<Table const, 2> positions, token_positions places, site where) {
    using namespace cuda_detail;
    auto const flag =
        ex.template handle<faults>().expect(fault::token, slice.vocabulary, where, tokens.extent(1));
    exec::launch(ex,
                 {.grid = exec::grid_of((tokens.size() + embedding_rows - 1) / embedding_rows),
                  .block = dim3(embedding_lanes, embedding_rows),
                  .where = where},
                 embedding_kernel<T, Table>, matrix_rows<T>(out), tokens, matrix_rows<Table const>(table),
                 slice, matrix_rows<Table const>(positions), places, table.extent(1), flag);
  }

  template <exec::cuda_space Ex, storage_scalar G, storage_scalar T>
  static void backward(Ex& ex, device_view<G, 2> d_table, detail::vocabulary_slice slice,
                       device_view<G, 2> d_positions, device_view<T const, 2> d_out,
                       device_view<std::int32_t const, 2> tokens, embedding_backward_options const& options,
                       site where) {
    using namespace cuda_detail;
    sum_rows(ex, d_table, d_out, sorted(ex, tokens, slice, where), options.accumulate_table, where);
    if (d_positions.data() != nullptr)
      sum_rows(ex, d_positions, d_out,
               rows_of_position{tokens.extent(0), tokens.extent(1), options.positions},
               options.accumulate_positions, where);
  }

private:
  template <class Tag, class T, exec::cuda_space Ex>
  static T* take(Ex& ex, index_t count, site where) {
    return ex.template handle<exec::scratch<Tag, exec::cuda_memory>>().template take<T>(count, where);
  }
  struct keys_in;
  struct keys_out;
  struct rows_in;
  struct rows_out;
  struct starts;
  struct sorting;

  template <exec::cuda_space Ex>
  static cuda_detail::rows_of_token sorted(Ex& ex, device_view<std::int32_t const, 2> tokens,
                                           detail::vocabulary_slice slice, site where) {
    using namespace cuda_detail;
    auto const count = narrow<std::int32_t>(tokens.size(), where);
    auto const classes = slice.size;
    auto const limit = static_cast<std::uint32_t>(narrow<std::int32_t>(classes, where));
    auto* keys = take<keys_in, std::uint32_t>(ex, count, where);
    auto* keys_sorted = take<keys_out, std::uint32_t>(ex, count, where);
    auto* rows = take<rows_in, std::int32_t>(ex, count, where);
    auto* rows_sorted = take<rows_out, std::int32_t>(ex, count, where);
    auto* first = take<starts, std::int32_t>(ex, classes + 1, where);
    if (count > 0) {
      auto const flag = ex.template handle<faults>().expect(fault::token_backward, slice.vocabulary, where,
                                                            tokens.extent(1));
      exec::launch(ex, {.grid = exec::grid_of((count + 255) / 256), .block = dim3(256), .where = where},
                   token_keys_kernel<std::uint32_t>, keys, rows, tokens, slice, flag);
      auto const bits = static_cast<int>(std::bit_width(limit));
      std::size_t bytes = 0;
      auto const sort = [&](void* memory) {
        exec::cuda_check(cub::DeviceRadixSort::SortPairs(memory, bytes,
                                                         static_cast<std::uint32_t const*>(keys), keys_sorted,
                                                         static_cast<std::int32_t const*>(rows), rows_sorted,
                                                         count, 0, bits, ex.stream()),
                         "cub::DeviceRadixSort::SortPairs", where);
      };
      sort(nullptr); // asks for the bytes
      sort(take<sorting, char>(ex, narrow<index_t>(bytes > 0 ? bytes : 1, where), where));
    }
    exec::launch(ex, {.grid = exec::grid_of((classes + 256) / 256), .block = dim3(256), .where = where},
                 token_starts_kernel<std::uint32_t>, first, static_cast<std::uint32_t const*>(keys_sorted),
                 count, limit);
    return {first, rows_sorted};
  }

  template <exec::cuda_space Ex, storage_scalar G, storage_scalar T, class Rows>
  static void sum_rows(Ex& ex, device_view<G, 2> out, device_view<T const, 2> in, Rows rows, bool accumulate,
                       site where) {
    using namespace cuda_detail;
    constexpr index_t across = embedding_lanes * exec::pack_size<G, T>;
    auto const count = out.extent(0), width = out.extent(1);
    exec::launch(
        ex,
        {.grid = exec::grid_of((count + embedding_rows - 1) / embedding_rows, (width + across - 1) / across),
         .block = dim3(embedding_lanes, embedding_rows),
         .where = where},
        row_sums_kernel<G, T, Rows>, matrix_rows<G>(out), matrix_rows<T const>(in), rows, count, width,
        accumulate);
  }
};

} // namespace tessera::inline TESSERA_ABI::ops

#endif
