/// Attention in plain CUDA C++, for what the tensor cores' tiles do not take: fp32, which stays fp32 in every
/// product, and heads wider than 128. One warp a row of the result, one lane a column of the scores; the row
/// and its sums stand in shared memory. Written to be checked against the formula, not to be fast.
#ifndef TESSERA_OPS_CUDA_DETAIL_ATTENTION_PLAIN_CUH
#define TESSERA_OPS_CUDA_DETAIL_ATTENTION_PLAIN_CUH

#include <tessera/ops/cuda/detail/attention_backward.cuh>
#include <tessera/ops/cuda/detail/attention_forward.cuh>
#include <tessera/ops/elementary.hpp>

namespace tessera::inline TESSERA_ABI::ops::cuda_detail {

/// Four warps a block, fewer where rows are so wide that their shared memory would not fit: each warp has
/// `floats_per_warp`.
struct attention_plain_tuning {
  static constexpr int warps = 4, shared_bytes = 48 << 10;

  static int threads(int floats_per_warp) noexcept {
    auto const fitting = shared_bytes / (4 * floats_per_warp);
    return 32 * (fitting < 1 ? 1 : fitting < warps ? fitting : warps);
  }
};

/// The row of the result that a warp works on, and its lane.
struct warp_row {
  int lane, token, head, sample;
  bool inside;

  __device__ warp_row(int tokens, int heads, int batch) : lane(static_cast<int>(threadIdx.x % 32)) {
    auto const row = index_t{blockIdx.x} * (blockDim.x / 32) + threadIdx.x / 32;
    token = static_cast<int>(row % tokens);
    head = static_cast<int>(row / tokens % heads);
    sample = static_cast<int>(row / tokens / heads);
    inside = sample < batch;
  }
};

/// The warp's part of the dynamic shared memory.
__device__ inline float* floats_of_warp(int count) {
  return exec::dynamic_shared<float>() + threadIdx.x / 32 * static_cast<unsigned>(count);
}

__device__ inline float maximum_of_warp(float x) {
  for (int step = 16; step > 0; step /= 2) x = fmaxf(x, __shfl_xor_sync(0xffffffffu, x, step));
  return x;
}
__device__ inline float sum_of_warp(float x) {
  for (int step = 16; step > 0; step /= 2) x += __shfl_xor_sync(0xffffffffu, x, step);
  return x;
}

template <storage_scalar T>
__device__ float dot(float const* a, T const* b, int width) {
  float sum = 0;
  for (int d = 0; d < width; ++d) sum += a[d] * static_cast<float>(b[d]);
  return sum;
}

/// sum[d] = shrink * sum[d] + Σ weight * row first + j, where `weight` is lane j's, over j < count.
template <storage_scalar T>
__device__ void add_rows(float* sum, float shrink, float weight, head_matrix<T const> const& rows, int first,
                         int count, int width, int lane) {
  for (int begin = 0; begin < width; begin += 32) {
    auto const d = begin + lane;
    float part = 0;
    for (int j = 0; j < count; ++j) {
      auto const w = __shfl_sync(0xffffffffu, weight, j);
      if (d < width) part += w * static_cast<float>(rows.row(first + j)[d]);
    }
    if (d < width) sum[d] = sum[d] * shrink + part;
  }
}

template <storage_scalar T>
__device__ void load_row(float* to, T const* from, int width, int lane, float factor = 1) {
  for (int d = lane; d < width; d += 32) to[d] = factor * static_cast<float>(from[d]);
}
template <storage_scalar T>
__device__ void store_row(T* to, float const* from, int width, int lane, float factor = 1) {
  for (int d = lane; d < width; d += 32) to[d] = T(factor * from[d]);
}
__device__ inline void clear_row(float* row, int width, int lane) {
  for (int d = lane; d < width; d += 32) row[d] = 0;
}

template <storage_scalar T>
TESSERA_KERNEL void attention_forward_plain(attention_forward_arguments<T> x, int batch) {
  auto const sizes = x.sizes;
  warp_row const at(sizes.queries, sizes.heads, batch);
  if (!at.inside) return;
  auto const key_head = at.head / sizes.group();
  head_matrix<T const> const k(x.k, at.sample, key_head), v(x.v, at.sample, key_head);
  auto *const q = floats_of_warp(2 * sizes.width), *const out = q + sizes.width;
  load_row(q, head_matrix<T const>(x.q, at.sample, at.head).row(at.token), sizes.width, at.lane, sizes.scale);
  clear_row(out, sizes.width, at.lane);
  __syncwarp();

  auto top = -std::numeric_limits<float>::infinity();
  float sum = 0;
  auto const visible = sizes.visible(at.token);
  for (int key = 0; key < visible; key += 32) {
    auto const seen = key + at.lane < visible;
    auto const score =
        seen ? dot(q, k.row(key + at.lane), sizes.width) : -std::numeric_limits<float>::infinity();
    auto const new_top = fmaxf(top, maximum_of_warp(score));
    auto const p = seen ? elementary::exp(score - new_top) : 0.0f, shrink = elementary::exp(top - new_top);
    sum = sum * shrink + sum_of_warp(p);
    top = new_top;
    add_rows(out, shrink, p, v, key, visible - key < 32 ? visible - key : 32, sizes.width, at.lane);
  }
  store_row(head_matrix<T>(x.out, at.sample, at.head).row(at.token), out, sizes.width, at.lane,
            sum > 0 ? 1 / sum : 0.0f);
  if (at.lane == 0)
    x.log_sum_exp[(index_t{at.sample} * sizes.heads + at.head) * sizes.queries + at.token] = top + logf(sum);
}

template <storage_scalar T>
TESSERA_KERNEL void attention_backward_queries_plain(attention_backward_arguments<T> x, int batch) {
  auto const sizes = x.sizes;
  warp_row const at(sizes.queries, sizes.heads, batch);
  if (!at.inside) return;
  auto const key_head = at.head / sizes.group();
  head_matrix<T const> const k(x.k, at.sample, key_head), v(x.v, at.sample, key_head);
  auto *const q = floats_of_warp(3 * sizes.width), *const d_out = q + sizes.width,
              *const dq = d_out + sizes.width;
  load_row(q, head_matrix<T const>(x.q, at.sample, at.head).row(at.token), sizes.width, at.lane, sizes.scale);
  load_row(d_out, head_matrix<T const>(x.d_out, at.sample, at.head).row(at.token), sizes.width, at.lane);
  clear_row(dq, sizes.width, at.lane);
  __syncwarp();

  auto const number = x.rows_of(at.sample, at.head) + at.token;
  auto const total = x.log_sum_exp[number], delta = x.delta[number];
  auto const visible = sizes.visible(at.token);
  for (int key = 0; key < visible; key += 32) {
    float ds = 0;
    if (key + at.lane < visible) {
      auto const p = elementary::exp(dot(q, k.row(key + at.lane), sizes.width) - total);
      ds = p * (dot(d_out, v.row(key + at.lane), sizes.width) - delta);
    }
    add_rows(dq, 1.0f, ds, k, key, visible - key < 32 ? visible - key : 32, sizes.width, at.lane);
  }
  store_row(head_matrix<T>(x.dq, at.sample, at.head).row(at.token), dq, sizes.width, at.lane, sizes.scale);
}

template <storage_scalar T>
TESSERA_KERNEL void attention_backward_keys_plain(attention_backward_arguments<T> x, int batch) {
  auto const sizes = x.sizes;
  warp_row const at(sizes.keys, sizes.key_heads, batch);
  if (!at.inside) return;
  auto *const k = floats_of_warp(4 * sizes.width), *const v = k + sizes.width;
  auto *const dk = v + sizes.width, *const dv = dk + sizes.width;
  load_row(k, head_matrix<T const>(x.k, at.sample, at.head).row(at.token), sizes.width, at.lane, sizes.scale);
  load_row(v, head_matrix<T const>(x.v, at.sample, at.head).row(at.token), sizes.width, at.lane);
  clear_row(dk, sizes.width, at.lane);
  clear_row(dv, sizes.width, at.lane);
  __syncwarp();

  auto const begin =
      at.token > sizes.first_query ? at.token - sizes.first_query : 0; // the first that sees it
  for (int head = at.head * sizes.group(); head < (at.head + 1) * sizes.group(); ++head) {
    head_matrix<T const> const q(x.q, at.sample, head), d_out(x.d_out, at.sample, head);
    auto const numbers = x.rows_of(at.sample, head);
    for (int query = begin; query < sizes.queries; query += 32) {
      float p = 0, ds = 0;
      if (query + at.lane < sizes.queries) {
        auto const number = numbers + query + at.lane;
        p = elementary::exp(dot(k, q.row(query + at.lane), sizes.width) - x.log_sum_exp[number]);
        ds = p * (dot(v, d_out.row(query + at.lane), sizes.width) - x.delta[number]);
      }
      auto const count = sizes.queries - query < 32 ? sizes.queries - query : 32;
      add_rows(dv, 1.0f, p, d_out, query, count, sizes.width, at.lane);
      add_rows(dk, 1.0f, ds, q, query, count, sizes.width, at.lane);
    }
  }
  store_row(head_matrix<T>(x.dk, at.sample, at.head).row(at.token), dk, sizes.width, at.lane, sizes.scale);
  store_row(head_matrix<T>(x.dv, at.sample, at.head).row(at.token), dv, sizes.width, at.lane);
}

} // namespace tessera::inline TESSERA_ABI::ops::cuda_detail

#endif
