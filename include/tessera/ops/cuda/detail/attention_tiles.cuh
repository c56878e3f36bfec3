/// What the attention kernels share: their sizes, matrices of one head in global memory, tiles of them in
/// shared memory, and products of tiles on the tensor cores.
///
/// A warp's product has 16 M rows and 8 N columns and stays in registers as float[M][N][4], as mma_16x8x16
/// (exec/device.cuh) leaves it: lane l holds rows l / 4 (elements 0, 1) and l / 4 + 8 (elements 2, 3) of each
/// 16 x 8 piece, in columns 2 (l % 4) and 2 (l % 4) + 1. Two such pieces side by side, rounded to 16 bits,
/// are just what the instruction wants as its left operand of 16 x 16: a product turns into the left operand
/// of the next one without leaving its registers.
#ifndef TESSERA_OPS_CUDA_DETAIL_ATTENTION_TILES_CUH
#define TESSERA_OPS_CUDA_DETAIL_ATTENTION_TILES_CUH

#include <tessera/exec/cuda.hpp>
#include <tessera/exec/device.cuh>
#include <tessera/exec/launch.cuh>
#include <tessera/ops/detail/attention_shape.hpp>

namespace tessera::inline TESSERA_ABI::ops::cuda_detail {

/// [batch, tokens, heads, width] on the device.
template <class T>
using attention_heads = view<T, 4, exec::cuda_memory>;

/// detail::attention_shape as kernels read it. Attention without a mask is causal attention whose first query
/// stands behind the last key, so kernels know only the latter.
struct attention_sizes {
  int queries, keys, heads, key_heads, width, first_query;
  float scale;

  attention_sizes(detail::attention_shape const& shape, site where)
      : queries(narrow<int>(shape.queries, where)), keys(narrow<int>(shape.keys, where)),
        heads(narrow<int>(shape.heads, where)), key_heads(narrow<int>(shape.key_heads, where)),
        width(narrow<int>(shape.width, where)),
        first_query(shape.causal && shape.first_query < shape.keys ? narrow<int>(shape.first_query, where)
                                                                   : keys),
        scale(shape.scale) {
    narrow<int>(shape.queries + shape.keys + 512, where); // positions in tiles that hang over
  }

  /// Keys that the query at `t` sees: 0 .. visible(t) - 1.
  TESSERA_HOST_DEVICE int visible(int t) const noexcept {
    auto const end = first_query + t + 1;
    return end < keys ? end : keys;
  }
  TESSERA_HOST_DEVICE int group() const noexcept { return heads / key_heads; }
};

/// One head of one sample: row t begins at data + t * stride.
template <class T>
struct head_matrix {
  T* data;
  index_t stride;

  __device__ head_matrix(attention_heads<T> const& x, int sample, int head)
      : data(x.data() + sample * x.stride(0) + head * x.stride(2)), stride(x.stride(1)) {}
  __device__ T* row(int t) const { return data + t * stride; }
};

/// Which block of rows of which head a thread block works on: the blocks of one head follow each other.
struct attention_place {
  int sample, head, block;

  __device__ attention_place(int heads, int blocks) {
    auto const index = static_cast<int>(blockIdx.x), row = index / blocks;
    block = index % blocks;
    head = row % heads;
    sample = row / heads;
  }
};

TESSERA_HOST_DEVICE constexpr int blocks_of(int count, int size) noexcept {
  return (count + size - 1) / size;
}

/// Whether every row of `x` begins at a multiple of 16 bytes and ends at one.
template <class T>
bool rows_are_aligned(attention_heads<T> const& x) {
  constexpr index_t unit = 16 / sizeof(T);
  for (int d = 0; d < 3; ++d)
    if (x.extent(d) > 1 && x.stride(d) % unit != 0) return false;
  return x.extent(3) % unit == 0 && reinterpret_cast<std::uintptr_t>(x.data()) % 16 == 0;
}

/// The largest value, and the sum, of the four lanes that share a row of a product.
__device__ inline float maximum_of_row(float x) {
  x = fmaxf(x, __shfl_xor_sync(0xffffffffu, x, 1));
  return fmaxf(x, __shfl_xor_sync(0xffffffffu, x, 2));
}
__device__ inline float sum_of_row(float x) {
  x += __shfl_xor_sync(0xffffffffu, x, 1);
  return x + __shfl_xor_sync(0xffffffffu, x, 2);
}

inline constexpr float log2_of_e = 1.44269504f, log_of_2 = 0.693147181f;

/// Rows of `Width` 16-bit elements in shared memory. A row's pieces of 16 bytes are permuted by the row's
/// number, so that eight rows of one column of pieces, which ldmatrix reads at once, lie in different banks.
template <exec::tensor_core_scalar T, int Width>
struct attention_tile {
  static constexpr int pieces = Width / 8;
  static_assert(pieces % 4 == 0 && Width % 16 == 0);

  /// Where piece `piece` of row `row` begins. 128 bytes hold the 32 banks: rows of whole multiples of that
  /// all begin at bank 0 and take eight different places; else rows begin at bank 0 and 16 in turn.
  static __device__ int at(int row, int piece) {
    return row * Width + 8 * (piece ^ (pieces % 8 == 0 ? row & 7 : row >> 1 & 3));
  }

  /// Starts to copy rows first .. first + Rows - 1 of `from`, zeros beyond row `end` and column `width`.
  /// Called by all `Threads` threads of a block. Rows that are not aligned are there on return, others when
  /// copy_async_wait says so; in both cases for all threads after the next barrier.
  template <int Rows, int Threads>
  static __device__ void load(T* tile, head_matrix<T const> from, int first, int end, int width,
                              bool aligned) {
    static_assert(Rows * pieces % Threads == 0);
    auto const thread = static_cast<int>(threadIdx.x);
    if (aligned) {
#pragma unroll
      for (int step = 0; step < Rows * pieces / Threads; ++step) {
        auto const i = step * Threads + thread;
        auto const row = i / pieces, piece = i % pieces;
        auto const inside = first + row < end && 8 * piece < width;
        exec::copy_async16(tile + at(row, piece), inside ? from.row(first + row) + 8 * piece : from.data,
                           inside);
      }
    } else {
#pragma unroll 1
      for (int i = thread; i < Rows * Width; i += Threads) {
        auto const row = i / Width, d = i % Width;
        tile[at(row, d / 8) + d % 8] = first + row < end && d < width ? from.row(first + row)[d] : T(0.0f);
      }
    }
  }

  /// sums += left rightᵀ, of rows row .. row + 16 M - 1 of `left` and rows 0 .. 8 N - 1 of `right`.
  template <int M, int N>
  static __device__ void multiply_transposed(float (&sums)[M][N][4], T const* left, int row, T const* right) {
#pragma unroll
    for (int k = 0; k < Width / 16; ++k) {
      std::uint32_t a[M][4];
#pragma unroll
      for (int m = 0; m < M; ++m) load_square(a[m], left, row + 16 * m, k);
#pragma unroll
      for (int n = 0; n < N; n += 2) {
        std::uint32_t b[4];
        load_columns(b, right, 8 * n, k);
#pragma unroll
        for (int m = 0; m < M; ++m) {
          exec::mma_16x8x16<T>(sums[m][n], a[m], b[0], b[1]);
          exec::mma_16x8x16<T>(sums[m][n + 1], a[m], b[2], b[3]);
        }
      }
    }
  }

  /// sums += left right, of a product `left`, rounded, and rows 0 .. 8 N - 1 of `right`.
  template <int M, int N>
  static __device__ void multiply(float (&sums)[M][Width / 8][4], float const (&left)[M][N][4],
                                  T const* right) {
#pragma unroll
    for (int k = 0; k < N / 2; ++k) {
      std::uint32_t a[M][4];
#pragma unroll
      for (int m = 0; m < M; ++m)
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          auto const& piece = left[m][2 * k + i / 2];
          a[m][i] = exec::pack_pair<T>(piece[i % 2 * 2], piece[i % 2 * 2 + 1]);
        }
#pragma unroll
      for (int n = 0; n < Width / 16; ++n) {
        std::uint32_t b[4];
        load_square_transposed(b, right, 16 * k, n);
#pragma unroll
        for (int m = 0; m < M; ++m) {
          exec::mma_16x8x16<T>(sums[m][2 * n], a[m], b[0], b[1]);
          exec::mma_16x8x16<T>(sums[m][2 * n + 1], a[m], b[2], b[3]);
        }
      }
    }
  }

  /// Writes a warp's product to rows first + row .. of `to`, as far as they lie before `end`, by way of rows
  /// row .. of `tile`, which this warp alone must be using.
  template <int M>
  static __device__ void store(head_matrix<T> to, int first, int end, int width, bool aligned, T* tile,
                               int row, float const (&values)[M][Width / 8][4]) {
    auto const lane = static_cast<int>(threadIdx.x % 32);
    __syncwarp();
#pragma unroll
    for (int m = 0; m < M; ++m)
#pragma unroll
      for (int n = 0; n < Width / 8; ++n)
#pragma unroll
        for (int h = 0; h < 2; ++h) {
          auto* pair = tile + at(row + 16 * m + 8 * h + lane / 4, n) + 2 * (lane % 4);
          *reinterpret_cast<std::uint32_t*>(pair) =
              exec::pack_pair<T>(values[m][n][2 * h], values[m][n][2 * h + 1]);
        }
    __syncwarp();
    for (int i = lane; i < 16 * M * pieces; i += 32) {
      auto const r = row + i / pieces, piece = i % pieces;
      if (first + r >= end) continue;
      auto const* from = tile + at(r, piece);
      auto* place = to.row(first + r) + 8 * piece;
      if (aligned) {
        if (8 * piece < width) exec::store16(place, exec::load16(from));
      } else {
        for (int e = 0; e < 8 && 8 * piece + e < width; ++e) place[e] = from[e];
      }
    }
  }

private:
  /// Rows row .. row + 15, columns 16 k .. 16 k + 15, as a left operand. The four 8 x 8 matrices are: upper
  /// left, lower left, upper right, lower right; each lane names one row of one of them.
  static __device__ void load_square(std::uint32_t (&a)[4], T const* tile, int row, int k) {
    auto const lane = static_cast<int>(threadIdx.x % 32);
    exec::load_matrix_x4(a, tile + at(row + lane % 16, 2 * k + lane / 16));
  }
  /// Rows row .. row + 15, read as 16 columns of a right operand, of depth 16 k .. 16 k + 15: b[0], b[1] for
  /// the first eight columns, b[2], b[3] for the others.
  static __device__ void load_columns(std::uint32_t (&b)[4], T const* tile, int row, int k) {
    auto const lane = static_cast<int>(threadIdx.x % 32);
    exec::load_matrix_x4(b, tile + at(row + lane / 16 * 8 + lane % 8, 2 * k + lane / 8 % 2));
  }
  /// Rows row .. row + 15 as the depth of a right operand, of columns 16 n .. 16 n + 15.
  static __device__ void load_square_transposed(std::uint32_t (&b)[4], T const* tile, int row, int n) {
    auto const lane = static_cast<int>(threadIdx.x % 32);
    exec::load_matrix_x4_transposed(b, tile + at(row + lane % 16, 2 * n + lane / 16));
  }
};

} // namespace tessera::inline TESSERA_ABI::ops::cuda_detail

#endif
