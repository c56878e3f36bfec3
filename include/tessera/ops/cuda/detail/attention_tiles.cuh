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

/// Whether every row of all of them begins and ends at multiples of 16 bytes, as tiles need it.
template <class... T>
bool rows_are_aligned(attention_heads<T> const&... all) {
  auto const is_aligned = []<class U>(attention_heads<U> const& x) {
    constexpr index_t unit = 16 / sizeof(U);
    for (int d = 0; d < 3; ++d)
      if (x.extent(d) > 1 && x.stride(d) % unit != 0) return false;
    return x.extent(3) % unit == 0 && reinterpret_cast<std::uintptr_t>(x.data()) % 16 == 0;
  };
  return (is_aligned(all) && ...);
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

/// A product, rounded to 16 bits: a left operand for each two pieces of 16 x 8.
template <exec::tensor_core_scalar T, int M, int N>
struct packed_product {
  std::uint32_t pairs[M][N / 2][4];

  __device__ explicit packed_product(float const (&values)[M][N][4]) {
#pragma unroll
    for (int i = 0; i < M * N * 2; ++i) {
      auto const m = i / (2 * N), n = i / 2 % N, c = i % 2 * 2;
      pairs[m][n / 2][n % 2 * 2 + c / 2] = exec::pack_pair<T>(values[m][n][c], values[m][n][c + 1]);
    }
  }
};

/// Rows of `Width` 16-bit elements in shared memory. A row's pieces of 16 bytes are permuted by the row's
/// number, so that eight rows of one column of pieces, which ldmatrix reads at once, lie in different banks.
template <exec::tensor_core_scalar T, int Width>
struct attention_tile {
  static constexpr int pieces = Width / 8;
  static_assert(pieces % 4 == 0 && Width % 16 == 0);

  /// Where piece `piece` of row `row` begins. 128 bytes hold the 32 banks: rows of whole multiples of that
  /// all begin at bank 0 and take eight different places; else rows begin at bank 0 and 16 in turn. Pieces
  /// change places among `turn` neighbours only.
  static constexpr int turn = pieces % 8 == 0 ? 8 : 4;
  static __device__ int at(int row, int piece) {
    return row * Width + 8 * (piece / turn * turn + ((piece ^ (turn == 8 ? row : row / 2)) & (turn - 1)));
  }

  /// Starts to copy rows first .. first + Rows - 1 of `from`, zeros beyond row `end` and column `width`; they
  /// are there when copy_async_wait says so. Called by all `Threads` threads of a block.
  template <int Rows, int Threads>
  static __device__ void load(T* tile, head_matrix<T const> const& from, int first, int end, int width) {
    // `turn` threads side by side copy a row, and go down the rows together.
    constexpr int step = Threads / turn;
    static_assert(Rows % step == 0 && step % 8 == 0);
    auto const thread = static_cast<int>(threadIdx.x);
    auto const row = first + thread / turn, column = 8 * (thread % turn);
    auto* to = tile + at(thread / turn, thread % turn);
    auto const* source = from.row(row) + column;
#pragma unroll
    for (int r = 0; r < Rows; r += step) {
#pragma unroll
      for (int c = 0; c < Width; c += 8 * turn)
        exec::copy_async16(to + r * Width + c, source + c, row + r < end && column + c < width);
      source += step * from.stride;
    }
  }

  /// 16 M rows of a tile, from `row` on, as a left operand that is read anew for each product. Steps of the
  /// product are unrolled `Unroll` at a time: the more, the more registers hold what was read ahead.
  template <int M, int Unroll = Width / 16>
  struct rows_in_shared {
    static constexpr int unroll = Unroll;
    T const* first;

    __device__ rows_in_shared(T const* tile, int row) : first(tile + row * Width) {}
    __device__ void read(std::uint32_t (&a)[M][4], int k) const {
#pragma unroll
      for (int m = 0; m < M; ++m) exec::load_matrix_x4(a[m], first + 16 * m * Width + shifted(square(), k));
    }
  };
  /// The same, read once and kept: Width M / 4 registers.
  template <int M>
  struct rows_in_registers {
    static constexpr int unroll = Width / 16;
    std::uint32_t all[Width / 16][M][4];

    __device__ rows_in_registers(T const* tile, int row) {
#pragma unroll
      for (int k = 0; k < Width / 16; ++k) rows_in_shared<M>(tile, row).read(all[k], k);
    }
    __device__ void read(std::uint32_t (&a)[M][4], int k) const {
#pragma unroll
      for (int i = 0; i < 4 * M; ++i) a[i / 4][i % 4] = all[k][i / 4][i % 4];
    }
  };

  /// sums += left rightᵀ, of rows 0 .. 8 N - 1 of `right`.
  template <int M, int N, class Rows>
  static __device__ void multiply_transposed(float (&sums)[M][N][4], Rows const& left, T const* right) {
#pragma unroll Rows::unroll
    for (int k = 0; k < Width / 16; ++k) {
      std::uint32_t a[M][4];
      left.read(a, k);
#pragma unroll
      for (int n = 0; n < N; n += 2) {
        std::uint32_t b[4];
        exec::load_matrix_x4(b, right + 8 * n * Width + shifted(columns(), k));
#pragma unroll
        for (int m = 0; m < M; ++m) {
          exec::mma_16x8x16<T>(sums[m][n], a[m], b[0], b[1]);
          exec::mma_16x8x16<T>(sums[m][n + 1], a[m], b[2], b[3]);
        }
      }
    }
  }

  /// sums += left right, of a product `left`, packed, and rows 0 .. 8 N - 1 of `right`.
  template <int M, int N>
  static __device__ void multiply(float (&sums)[M][Width / 8][4], packed_product<T, M, N> const& left,
                                  T const* right) {
#pragma unroll
    for (int k = 0; k < N / 2; ++k)
#pragma unroll
      for (int n = 0; n < Width / 16; ++n) {
        std::uint32_t b[4];
        exec::load_matrix_x4_transposed(b, right + 16 * k * Width + shifted(square(), n));
#pragma unroll
        for (int m = 0; m < M; ++m) {
          exec::mma_16x8x16<T>(sums[m][2 * n], left.pairs[m][k], b[0], b[1]);
          exec::mma_16x8x16<T>(sums[m][2 * n + 1], left.pairs[m][k], b[2], b[3]);
        }
      }
  }

  /// Writes a warp's product to rows first + row .. of `to`, as far as they lie before `end`, by way of rows
  /// row .. of `tile`, which this warp alone must be using.
  template <int M>
  static __device__ void store(head_matrix<T> const& to, int first, int end, int width, T* tile, int row,
                               float const (&values)[M][Width / 8][4]) {
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
      if (first + r < end && 8 * piece < width)
        exec::store16(to.row(first + r) + 8 * piece, exec::load16(tile + at(r, piece)));
    }
  }

private:
  // Four 8 x 8 matrices are read at once, of which each lane names one row: of rows 0 .. 15 in pieces 0 and
  // 1, from where `shifted` leads to pieces 2 k and 2 k + 1.

  /// Upper left, lower left, upper right, lower right: a left operand as it is; transposed, a right operand
  /// of 16 columns whose depth runs down the rows.
  static __device__ int square() {
    auto const lane = static_cast<int>(threadIdx.x % 32);
    return at(lane % 16, lane / 16);
  }
  /// Upper left, upper right, lower left, lower right: a right operand of 16 columns, which are the rows.
  static __device__ int columns() {
    auto const lane = static_cast<int>(threadIdx.x % 32);
    return at(lane / 16 * 8 + lane % 8, lane / 8 % 2);
  }
  /// Permuting the pieces is an exclusive or, and rows begin at multiples of `turn` pieces.
  static __device__ int shifted(int offset, int k) {
    return (offset ^ 16 * (k % (turn / 2))) + 8 * turn * (k / (turn / 2));
  }
};

} // namespace tessera::inline TESSERA_ABI::ops::cuda_detail

#endif
