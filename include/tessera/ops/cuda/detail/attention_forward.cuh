/// Attention forward on the tensor cores (Dao, "FlashAttention-2", 2023). A thread block takes a block of
/// queries of one head and walks over the keys that they see; each warp keeps its rows of the output, their
/// reference exponents and sums in registers, and everything is written once, at the end.
#ifndef TESSERA_OPS_CUDA_DETAIL_ATTENTION_FORWARD_CUH
#define TESSERA_OPS_CUDA_DETAIL_ATTENTION_FORWARD_CUH

#include <tessera/ops/cuda/detail/attention_tiles.cuh>

namespace tessera::inline TESSERA_ABI::ops::cuda_detail {

/// Tile sizes of the forward kernel. Two row tiles of 16 a warp: each right operand read from shared memory
/// serves two products.
template <int Width>
struct attention_forward_tuning {
  static constexpr int warps = 4, row_tiles = 2, keys = 64;
  static constexpr int unroll = Width < 128 ? Width / 16 : 2; ///< More, and registers spill.
  static constexpr bool keep_queries = Width == 64; ///< In registers, from the first product to the last.
  static constexpr int threads = 32 * warps, queries = 16 * row_tiles * warps;
  static constexpr int shared_bytes = (queries + 2 * keys) * Width * 2;
};

template <storage_scalar T>
struct attention_forward_arguments {
  attention_heads<T> out;
  float* log_sum_exp;
  attention_heads<T const> q, k, v;
  attention_sizes sizes;
};

/// Softmax over columns that come in blocks. Exponentials are taken relative to a reference for each row.
/// The reference follows the row's maximum, but not at once: while the maximum exceeds it by less than 2^8,
/// nothing can overflow, and a pass over the output is saved.
template <int M, int N>
class online_softmax {
public:
  __device__ online_softmax() {
#pragma unroll
    for (int i = 0; i < 2 * M; ++i) {
      reference_[i / 2][i % 2] = lowest;
      sum_[i / 2][i % 2] = 0;
    }
  }

  /// Turns scores into exponentials of factor * score, factor > 0 and in units of log 2; rescales `out`.
  template <int W>
  __device__ void apply(float (&scores)[M][N][4], float (&out)[M][W][4], float factor) {
    float top[M][2];
    auto far = false;
#pragma unroll
    for (int m = 0; m < M; ++m)
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        auto largest = scores[m][0][2 * h];
#pragma unroll
        for (int n = 0; n < N; ++n)
          largest = fmaxf(largest, fmaxf(scores[m][n][2 * h], scores[m][n][2 * h + 1]));
        top[m][h] = maximum_of_row(largest) * factor;
        far = far || top[m][h] > reference_[m][h] + 8;
      }
    if (__any_sync(0xffffffffu, far)) follow(top, out);
#pragma unroll
    for (int m = 0; m < M; ++m)
#pragma unroll
      for (int n = 0; n < N; ++n)
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          auto const e = exec::exp2_approximate(fmaf(scores[m][n][i], factor, -reference_[m][i / 2]));
          scores[m][n][i] = e;
          sum_[m][i / 2] += e;
        }
  }

  /// Adds up the sums of the lanes of a row; call once, after the last block.
  __device__ void finish() {
#pragma unroll
    for (int i = 0; i < 2 * M; ++i) sum_[i / 2][i % 2] = sum_of_row(sum_[i / 2][i % 2]);
  }
  /// What the output of row (m, h) must be multiplied by, zero where nothing was seen.
  __device__ float normaliser(int m, int h) const {
    return sum_[m][h] > 0 ? 1 / sum_[m][h] : 0.0f;
  }
  __device__ float log_sum_exp(int m, int h) const {
    return (reference_[m][h] + log2f(sum_[m][h])) * log_of_2;
  }

private:
  /// Finite, so that the difference to the score of a hidden key, minus infinity, is no NaN.
  static constexpr float lowest = std::numeric_limits<float>::lowest();

  template <int W>
  __device__ void follow(float const (&top)[M][2], float (&out)[M][W][4]) {
#pragma unroll
    for (int m = 0; m < M; ++m)
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        auto const reference = fmaxf(reference_[m][h], top[m][h]);
        auto const shrink = exec::exp2_approximate(reference_[m][h] - reference);
        reference_[m][h] = reference;
        sum_[m][h] *= shrink;
#pragma unroll
        for (int n = 0; n < W; ++n) {
          out[m][n][2 * h] *= shrink;
          out[m][n][2 * h + 1] *= shrink;
        }
      }
  }

  float reference_[M][2], sum_[M][2]; ///< The sum is that of the lane's own columns until finish().
};

template <int M, int N>
__device__ void negate(float (&values)[M][N][4]) {
#pragma unroll
  for (int i = 0; i < M * N * 4; ++i) values[i / (4 * N)][i / 4 % N][i % 4] *= -1.0f;
}

/// The keys and the values of a block have one place in shared memory each: while one is multiplied, the
/// other is on its way.
template <exec::tensor_core_scalar T, int Width>
TESSERA_KERNEL void __launch_bounds__(attention_forward_tuning<Width>::threads, 2)
    attention_forward_tiles(attention_forward_arguments<T> x) {
  using tuning = attention_forward_tuning<Width>;
  using tile = attention_tile<T, Width>;
  constexpr int queries = tuning::queries, keys = tuning::keys, threads = tuning::threads;
  constexpr int M = tuning::row_tiles, N = keys / 8;
  using rows = std::conditional_t<tuning::keep_queries, typename tile::template rows_in_registers<M>,
                                  typename tile::template rows_in_shared<M, tuning::unroll>>;
  auto const sizes = x.sizes;
  auto const blocks = blocks_of(sizes.queries, queries);
  attention_place const place(sizes.heads, blocks);
  auto const lane = static_cast<int>(threadIdx.x % 32);
  auto const row = static_cast<int>(threadIdx.x / 32) * 16 * M; // the warp's first, in the block
  auto const first = (blocks - 1 - place.block) * queries; // the block's first: the longest walks start first
  auto const key_head = place.head / sizes.group();
  head_matrix<T const> const q(x.q, place.sample, place.head), k(x.k, place.sample, key_head),
      v(x.v, place.sample, key_head);

  auto* const q_tile = exec::dynamic_shared<T>();
  auto *const k_tile = q_tile + queries * Width, *const v_tile = k_tile + keys * Width;
  float out[M][Width / 8][4] = {};
  online_softmax<M, N> softmax;
  auto const factor = fabsf(sizes.scale) * log2_of_e;

  auto const end = sizes.visible((first + queries < sizes.queries ? first + queries : sizes.queries) - 1);
  auto const warp_begin = sizes.visible(first + row);
  auto const warp_end = first + row < sizes.queries ? sizes.visible(first + row + 16 * M - 1) : 0;
  tile::template load<queries, threads>(q_tile, q, first, sizes.queries, sizes.width);
  tile::template load<keys, threads>(k_tile, k, 0, sizes.keys, sizes.width);
  exec::copy_async_commit();
  exec::copy_async_wait<0>();
  __syncthreads();
  rows const q_rows(q_tile, row);
  for (int key = 0; key < end; key += keys) {
    float scores[M][N][4] = {};
    exec::copy_async_wait<0>();
    __syncthreads(); // the keys are there, and nobody reads values any more
    tile::template load<keys, threads>(v_tile, v, key, sizes.keys, sizes.width);
    exec::copy_async_commit();
    if (key < warp_end) tile::multiply_transposed(scores, q_rows, k_tile);

    exec::copy_async_wait<0>();
    __syncthreads(); // the values are there, and nobody reads keys any more
    if (key < warp_end) {
      if (sizes.scale < 0) negate(scores);
      if (key + keys > warp_begin) {
#pragma unroll
        for (int i = 0; i < M * N * 4; ++i) {
          auto const m = i / (4 * N), n = i / 4 % N, c = i % 4;
          auto const query = first + row + 16 * m + c / 2 * 8 + lane / 4;
          if (key + 8 * n + 2 * (lane % 4) + c % 2 >= sizes.visible(query))
            scores[m][n][c] = -std::numeric_limits<float>::infinity();
        }
      }
      softmax.apply(scores, out, factor);
    }
    packed_product<T, M, N> const p(scores);
    if (key + keys < end) { // not before: the copy's addresses would need the registers of the scores
      tile::template load<keys, threads>(k_tile, k, key + keys, sizes.keys, sizes.width);
      exec::copy_async_commit();
    }
    if (key < warp_end) tile::multiply(out, p, v_tile);
  }

  softmax.finish();
#pragma unroll
  for (int m = 0; m < M; ++m)
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      auto const normaliser = softmax.normaliser(m, h);
#pragma unroll
      for (int n = 0; n < Width / 8; ++n) {
        out[m][n][2 * h] *= normaliser;
        out[m][n][2 * h + 1] *= normaliser;
      }
      auto const query = first + row + 16 * m + 8 * h + lane / 4;
      if (lane % 4 == 0 && query < sizes.queries)
        x.log_sum_exp[(index_t{place.sample} * sizes.heads + place.head) * sizes.queries + query] =
            softmax.log_sum_exp(m, h);
    }
  tile::store(head_matrix<T>(x.out, place.sample, place.head), first, sizes.queries, sizes.width, q_tile, row,
              out);
}

} // namespace tessera::inline TESSERA_ABI::ops::cuda_detail

#endif
