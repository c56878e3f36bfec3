/// How kernels that work row by row are laid out: a group of threads to a row, each thread with its share of
/// the row in registers. A block holds blockDim.y groups of blockDim.x threads, whole warps; a thread of a
/// group takes the packs threadIdx.x, threadIdx.x + blockDim.x, ... of the row.
#ifndef TESSERA_OPS_CUDA_DETAIL_ROWS_CUH
#define TESSERA_OPS_CUDA_DETAIL_ROWS_CUH

#include <type_traits>

#include <tessera/exec/launch.cuh>
#include <tessera/exec/pack.cuh>

namespace tessera::inline TESSERA_ABI::ops::cuda_detail {

/// The most threads of a group, and of a block.
inline constexpr int most_row_threads = 512;

/// Threads to a row of `width` elements, `each` elements to a thread at most: a power of two of them, up to
/// most_row_threads. Rows that are longer still are worked through in stretches.
inline index_t row_threads(index_t width, int each) noexcept {
  index_t threads = 32;
  while (threads < most_row_threads && threads * each < width) threads *= 2;
  return threads;
}

/// Rows of a matrix.
template <class T>
struct row_array {
  T* data;
  index_t stride;

  template <memory_space M>
  row_array(view<T, 2, M> rows) : data(rows.data()), stride(rows.stride(0)) {} // NOLINT: meant to be implicit
  __device__ __forceinline__ T* row(index_t r) const { return data + r * stride; }
  bool aligned() const { return exec::aligned16(data, stride); }
};

/// Calls f(k, i) for each pack k of this thread in the stretch of a row that starts at `begin`, whose first
/// element is i. N is the elements of a pack (exec::pack_size of all the types that a kernel moves), or 1
/// where rows do not allow accesses of 16 bytes.
template <int N, int Packs, class F>
__device__ __forceinline__ void for_packs(int begin, int width, F&& f) {
#pragma unroll
  for (int k = 0; k < Packs; ++k) {
    auto const i = begin + (k * int(blockDim.x) + int(threadIdx.x)) * N;
    if (i < width) f(k, i);
  }
}

/// The thread's packs of a stretch, as they are stored.
template <int N, int Packs, storage_scalar T>
struct row_packs {
  struct single {
    T values[1];
  };
  using access = std::conditional_t<N == 1, single, exec::vector16<T>>;
  static constexpr int count = sizeof(access) / sizeof(T), parts = N / count;
  static_assert(N % count == 0);
  access part[Packs * parts];

  __device__ __forceinline__ float operator()(int k, int e) const {
    if constexpr (parts == 1) // the divisions below count where nvcc decides what to unroll
      return part[k].values[e];
    else
      return part[k * parts + e / count].values[e % count];
  }
};

/// Reads them; 0 behind the row's end. All loads are under way before the first is waited for.
template <int N, int Packs, storage_scalar T>
__device__ __forceinline__ row_packs<N, Packs, T> read_packs(T const* row, int begin, int width) {
  using packs = row_packs<N, Packs, T>;
  packs read = {};
  for_packs<N, Packs>(begin, width, [&](int k, int i) {
    if constexpr (N == 1) {
      read.part[k].values[0] = row[i];
    } else {
#pragma unroll
      for (int p = 0; p < packs::parts; ++p)
        read.part[k * packs::parts + p] = exec::load16(row + i + p * packs::count);
    }
  });
  return read;
}

/// Replaces each value by its sum over the threads of the group, the same bits in all of them. Called by the
/// whole block, or by whole groups where a group is one warp.
template <int Count>
__device__ __forceinline__ void sum_over_group(float (&value)[Count]) {
  constexpr auto all = 0xffffffffu;
#pragma unroll
  for (int c = 0; c < Count; ++c)
#pragma unroll
    for (int distance = 16; distance > 0; distance /= 2) value[c] += __shfl_xor_sync(all, value[c], distance);
  if (blockDim.x == 32) return;

  __shared__ float of_warp[Count][most_row_threads / 32];
  auto const group_first = threadIdx.y * blockDim.x / 32, warps = blockDim.x / 32;
  __syncthreads(); // the sums before these have been read
  if (threadIdx.x % 32 == 0)
    for (int c = 0; c < Count; ++c) of_warp[c][group_first + threadIdx.x / 32] = value[c];
  __syncthreads();
#pragma unroll
  for (int c = 0; c < Count; ++c) {
    value[c] = 0;
    for (unsigned w = 0; w < warps; ++w) value[c] += of_warp[c][group_first + w];
  }
}

} // namespace tessera::inline TESSERA_ABI::ops::cuda_detail

#endif
