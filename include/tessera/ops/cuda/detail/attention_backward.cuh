/// Attention backward on the tensor cores. Scores are made again from the logarithms of their sums; with
/// delta = sum(d_out * out) of a query, P = exp(scale q kᵀ - log_sum_exp) and dS = P * (d_out vᵀ - delta),
///     dv = Pᵀ d_out,   dk = scale dSᵀ q,   dq = scale dS k.
/// Three kernels: delta; dk and dv, a thread block for each block of keys; dq, one for each block of queries.
/// The latter two both make P and dS (7 products of tiles where one kernel with atomic sums needs 5), and in
/// return every sum is made by one warp, in registers, in an order that does not change.
#ifndef TESSERA_OPS_CUDA_DETAIL_ATTENTION_BACKWARD_CUH
#define TESSERA_OPS_CUDA_DETAIL_ATTENTION_BACKWARD_CUH

#include <tessera/ops/cuda/detail/attention_tiles.cuh>

namespace tessera::inline TESSERA_ABI::ops::cuda_detail {

/// Of the kernel for dk and dv. Its two sums take 16 row_tiles x Width floats of a warp's registers each.
template <int Width>
struct attention_keys_tuning {
  static constexpr int warps = 4, row_tiles = Width == 64 ? 2 : 1, queries = Width == 96 ? 64 : 32;
  static constexpr int unroll = Width == 64 ? 2 : Width / 16; ///< More, and registers spill.
  static constexpr int threads = 32 * warps, keys = 16 * row_tiles * warps;
  static constexpr int shared_bytes = (2 * keys + 4 * queries) * Width * 2 + 4 * queries * 4;
};

/// Of the kernel for dq.
template <int Width>
struct attention_queries_tuning {
  static constexpr int warps = 4, row_tiles = 2, keys = 32;
  static constexpr int unroll = Width < 128 ? Width / 16 : 2; ///< More, and registers spill.
  static constexpr int threads = 32 * warps, queries = 16 * row_tiles * warps;
  static constexpr int shared_bytes = (2 * queries + 4 * keys) * Width * 2;
};

template <storage_scalar T>
struct attention_backward_arguments {
  attention_heads<T> dq, dk, dv;
  attention_heads<T const> d_out, q, k, v, out;
  float const* log_sum_exp;
  float* delta; ///< [batch, heads, queries], as log_sum_exp.
  attention_sizes sizes;
  bool aligned; ///< Rows can be read 16 bytes at a time.

  /// Where the numbers of a head's queries begin in log_sum_exp and delta.
  __device__ index_t rows_of(int sample, int head) const {
    return (index_t{sample} * sizes.heads + head) * sizes.queries;
  }
};

inline constexpr int attention_delta_threads = 256;

/// delta = sum(d_out * out) of each row; eight lanes a row, four rows a warp.
template <storage_scalar T>
TESSERA_KERNEL void __launch_bounds__(attention_delta_threads)
    attention_delta(attention_backward_arguments<T> x, index_t rows) {
  constexpr int unit = 16 / sizeof(T), lanes = 8;
  auto const row = (index_t{blockIdx.x} * attention_delta_threads + threadIdx.x) / lanes;
  auto const lane = static_cast<int>(threadIdx.x % lanes);
  auto const& sizes = x.sizes;
  float sum = 0;
  auto const head = static_cast<int>(row % sizes.heads);
  auto const query = static_cast<int>(row / sizes.heads % sizes.queries);
  auto const sample = static_cast<int>(row / sizes.heads / sizes.queries);
  if (row < rows) {
    auto const* a = head_matrix<T const>(x.d_out, sample, head).row(query);
    auto const* b = head_matrix<T const>(x.out, sample, head).row(query);
    if (x.aligned) {
      for (int d = unit * lane; d < sizes.width; d += unit * lanes) {
        auto const left = exec::load16(a + d), right = exec::load16(b + d);
#pragma unroll
        for (int i = 0; i < unit; ++i) sum += static_cast<float>(left[i]) * static_cast<float>(right[i]);
      }
    } else {
      for (int d = lane; d < sizes.width; d += lanes)
        sum += static_cast<float>(a[d]) * static_cast<float>(b[d]);
    }
  }
#pragma unroll
  for (int step = lanes / 2; step > 0; step /= 2) sum += __shfl_xor_sync(0xffffffffu, sum, step);
  if (row < rows && lane == 0) x.delta[x.rows_of(sample, head) + query] = sum;
}

/// dk and dv of a block of keys: sums over the queries of all heads that read them, head after head. Scores
/// stand on their side (rows are keys), so that Pᵀ and dSᵀ are left operands as they are. Queries and d_out
/// have two places each: while one block is multiplied, the next one is on its way.
template <exec::tensor_core_scalar T, int Width>
TESSERA_KERNEL void __launch_bounds__(attention_keys_tuning<Width>::threads, 2)
    attention_backward_keys(attention_backward_arguments<T> x) {
  using tuning = attention_keys_tuning<Width>;
  using tile = attention_tile<T, Width>;
  constexpr int queries = tuning::queries, keys = tuning::keys, threads = tuning::threads;
  constexpr int M = tuning::row_tiles, N = queries / 8;
  using rows = typename tile::template rows_in_shared<M, tuning::unroll>;
  static_assert(2 * queries <= threads);
  auto const sizes = x.sizes;
  attention_place const place(sizes.key_heads, blocks_of(sizes.keys, keys));
  auto const thread = static_cast<int>(threadIdx.x), lane = thread % 32;
  auto const first = place.block * keys, row = thread / 32 * 16 * M, own = first + row;

  auto* const k_tile = exec::dynamic_shared<T>();
  auto *const v_tile = k_tile + keys * Width, *const q_tiles = v_tile + keys * Width;
  auto* const d_out_tiles = q_tiles + 2 * queries * Width;
  auto* const numbers = reinterpret_cast<float*>(d_out_tiles + 2 * queries * Width);
  float dk[M][Width / 8][4] = {}, dv[M][Width / 8][4] = {};

  // The blocks of queries that see any of the keys, of one head after the other.
  auto const group = sizes.group(), last = blocks_of(sizes.queries, queries);
  auto const begin = first > sizes.first_query ? (first - sizes.first_query) / queries : 0;
  auto next_head = begin < last ? 0 : group, next_block = begin, place_of_next = 0;
  auto const load_next = [&] {
    auto const head = place.head * group + next_head, query = next_block * queries;
    tile::template load<queries, threads>(q_tiles + place_of_next * queries * Width,
                                          head_matrix<T const>(x.q, place.sample, head), query, sizes.queries,
                                          sizes.width);
    tile::template load<queries, threads>(d_out_tiles + place_of_next * queries * Width,
                                          head_matrix<T const>(x.d_out, place.sample, head), query,
                                          sizes.queries, sizes.width);
    if (thread < 2 * queries) {
      auto const inside = query + thread % queries < sizes.queries;
      auto const at = inside ? x.rows_of(place.sample, head) + query + thread % queries : 0;
      exec::copy_async4(numbers + place_of_next * 2 * queries + thread,
                        (thread < queries ? x.log_sum_exp : x.delta) + at, inside);
    }
    exec::copy_async_commit();
  };

  tile::template load<keys, threads>(k_tile, {x.k, place.sample, place.head}, first, sizes.keys, sizes.width);
  tile::template load<keys, threads>(v_tile, {x.v, place.sample, place.head}, first, sizes.keys, sizes.width);
  if (next_head < group) load_next();
  while (next_head < group) {
    auto const query = next_block * queries;
    auto const* const q_tile = q_tiles + place_of_next * queries * Width;
    auto const* const d_out_tile = d_out_tiles + place_of_next * queries * Width;
    auto const* const log_sum_exp = numbers + place_of_next * 2 * queries;
    auto const* const delta = log_sum_exp + queries;
    exec::copy_async_wait<0>();
    __syncthreads(); // this block is there, and nobody reads the one before it any more
    place_of_next ^= 1;
    if (++next_block == last) ++next_head, next_block = begin;
    if (next_head < group) load_next();
    if (own >= sizes.visible(query + queries - 1)) continue;

    float p[M][N][4] = {}, ds[M][N][4] = {};
    tile::multiply_transposed(p, rows(k_tile, row), q_tile);
    auto const factor = sizes.scale * log2_of_e;
#pragma unroll
    for (int i = 0; i < M * N * 4; ++i) {
      auto const m = i / (4 * N), n = i / 4 % N, c = i % 4;
      auto const total = log_sum_exp[8 * n + 2 * (lane % 4) + c % 2] * log2_of_e;
      p[m][n][c] = exec::exp2_approximate(fmaf(p[m][n][c], factor, -total));
    }
    if (own + 16 * M > sizes.visible(query)) {
#pragma unroll
      for (int i = 0; i < M * N * 4; ++i) {
        auto const m = i / (4 * N), n = i / 4 % N, c = i % 4;
        auto const key = own + 16 * m + c / 2 * 8 + lane / 4;
        if (key >= sizes.visible(query + 8 * n + 2 * (lane % 4) + c % 2)) p[m][n][c] = 0;
      }
    }
    tile::multiply_transposed(ds, rows(v_tile, row), d_out_tile);
#pragma unroll
    for (int i = 0; i < M * N * 4; ++i) {
      auto const m = i / (4 * N), n = i / 4 % N, c = i % 4;
      ds[m][n][c] = p[m][n][c] * (ds[m][n][c] - delta[8 * n + 2 * (lane % 4) + c % 2]);
    }
    packed_product<T, M, N> const packed_p(p), packed_ds(ds);
    tile::multiply(dv, packed_p, d_out_tile);
    tile::multiply(dk, packed_ds, q_tile);
  }
  exec::copy_async_wait<0>(); // where nobody sees the keys, they are still on their way
  __syncthreads();

#pragma unroll
  for (int i = 0; i < M * Width / 2; ++i) dk[i / (Width / 2)][i / 4 % (Width / 8)][i % 4] *= sizes.scale;
  tile::store(head_matrix<T>(x.dk, place.sample, place.head), first, sizes.keys, sizes.width, k_tile, row,
              dk);
  tile::store(head_matrix<T>(x.dv, place.sample, place.head), first, sizes.keys, sizes.width, v_tile, row,
              dv);
}

/// dq of a block of queries: a sum over the keys that they see, two places each for keys and values.
template <exec::tensor_core_scalar T, int Width>
TESSERA_KERNEL void __launch_bounds__(attention_queries_tuning<Width>::threads, 2)
    attention_backward_queries(attention_backward_arguments<T> x) {
  using tuning = attention_queries_tuning<Width>;
  using tile = attention_tile<T, Width>;
  constexpr int queries = tuning::queries, keys = tuning::keys, threads = tuning::threads;
  constexpr int M = tuning::row_tiles, N = keys / 8;
  using rows = typename tile::template rows_in_shared<M, tuning::unroll>;
  auto const sizes = x.sizes;
  auto const blocks = blocks_of(sizes.queries, queries);
  attention_place const place(sizes.heads, blocks);
  auto const lane = static_cast<int>(threadIdx.x % 32);
  auto const row = static_cast<int>(threadIdx.x / 32) * 16 * M;
  auto const first = (blocks - 1 - place.block) * queries, own = first + row;
  auto const key_head = place.head / sizes.group();
  head_matrix<T const> const k(x.k, place.sample, key_head), v(x.v, place.sample, key_head);

  auto* const q_tile = exec::dynamic_shared<T>();
  auto *const d_out_tile = q_tile + queries * Width, *const k_tiles = d_out_tile + queries * Width;
  auto* const v_tiles = k_tiles + 2 * keys * Width;
  float dq[M][Width / 8][4] = {};

  float total[M][2], delta[M][2];
#pragma unroll
  for (int i = 0; i < 2 * M; ++i) {
    auto const query = own + 8 * i + lane / 4;
    auto const at = x.rows_of(place.sample, place.head) + query;
    total[i / 2][i % 2] = query < sizes.queries ? x.log_sum_exp[at] * log2_of_e : 0.0f;
    delta[i / 2][i % 2] = query < sizes.queries ? x.delta[at] : 0.0f;
  }
  auto const load = [&](int key) {
    auto const at = key / keys % 2 * keys * Width;
    tile::template load<keys, threads>(k_tiles + at, k, key, sizes.keys, sizes.width);
    tile::template load<keys, threads>(v_tiles + at, v, key, sizes.keys, sizes.width);
    exec::copy_async_commit();
  };

  auto const end = sizes.visible((first + queries < sizes.queries ? first + queries : sizes.queries) - 1);
  auto const warp_begin = sizes.visible(own);
  auto const warp_end = own < sizes.queries ? sizes.visible(own + 16 * M - 1) : 0;
  tile::template load<queries, threads>(q_tile, {x.q, place.sample, place.head}, first, sizes.queries,
                                        sizes.width);
  tile::template load<queries, threads>(d_out_tile, {x.d_out, place.sample, place.head}, first, sizes.queries,
                                        sizes.width);
  load(0);
  for (int key = 0; key < end; key += keys) {
    exec::copy_async_wait<0>();
    __syncthreads(); // this block is there, and nobody reads the one before it any more
    if (key + keys < end) load(key + keys);
    if (key >= warp_end) continue;
    auto const at = key / keys % 2 * keys * Width;

    float p[M][N][4] = {}, ds[M][N][4] = {};
    tile::multiply_transposed(p, rows(q_tile, row), k_tiles + at);
    auto const factor = sizes.scale * log2_of_e;
#pragma unroll
    for (int i = 0; i < M * N * 4; ++i) {
      auto const m = i / (4 * N), n = i / 4 % N, c = i % 4;
      p[m][n][c] = exec::exp2_approximate(fmaf(p[m][n][c], factor, -total[m][c / 2]));
    }
    if (key + keys > warp_begin) {
#pragma unroll
      for (int i = 0; i < M * N * 4; ++i) {
        auto const m = i / (4 * N), n = i / 4 % N, c = i % 4;
        auto const query = own + 16 * m + c / 2 * 8 + lane / 4;
        if (key + 8 * n + 2 * (lane % 4) + c % 2 >= sizes.visible(query)) p[m][n][c] = 0;
      }
    }
    tile::multiply_transposed(ds, rows(d_out_tile, row), v_tiles + at);
#pragma unroll
    for (int i = 0; i < M * N * 4; ++i) {
      auto const m = i / (4 * N), n = i / 4 % N, c = i % 4;
      ds[m][n][c] = p[m][n][c] * (ds[m][n][c] - delta[m][c / 2]);
    }
    tile::multiply(dq, packed_product<T, M, N>(ds), k_tiles + at);
  }
  exec::copy_async_wait<0>(); // where there was no key, the queries are still on their way
  __syncthreads();

#pragma unroll
  for (int i = 0; i < M * Width / 2; ++i) dq[i / (Width / 2)][i / 4 % (Width / 8)][i % 4] *= sizes.scale;
  tile::store(head_matrix<T>(x.dq, place.sample, place.head), first, sizes.queries, sizes.width, q_tile, row,
              dq);
}

} // namespace tessera::inline TESSERA_ABI::ops::cuda_detail

#endif
