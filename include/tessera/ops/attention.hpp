/// Scaled dot-product attention with causal mask and grouped heads, in blocks (Dao, Fu, Ermon, Rudra and Ré,
/// "FlashAttention", 2022): softmax(scale q k^T) v without ever holding a matrix of scores, so memory is
/// linear in the number of tokens. The backward recomputes scores from the logarithms of their sums.
///
///     ops::attention(ex, out, log_sum_exp, q, k, v);
///     ops::attention_backward(ex, dq, dk, dv, d_out, q, k, v, out, log_sum_exp);
///
/// Views may be strided (slices of one packed [B, T, 3, H, D]); only the last stride must be 1.
/// Cost: 4 B H T S D operations forward (half of it causal), 10 B H T S D backward.
#ifndef TESSERA_OPS_ATTENTION_HPP
#define TESSERA_OPS_ATTENTION_HPP

#include <cmath>

#include <tessera/core/scalar.hpp>
#include <tessera/exec/space.hpp>
#include <tessera/ops/detail/attention_shape.hpp>
#include <tessera/ops/shapes.hpp>

namespace tessera::inline TESSERA_ABI::ops {

struct attention_options {
  /// Factor on q k^T; 0 stands for 1 / sqrt(D).
  float scale = 0;
  /// Query t sees keys up to position first_query + t; otherwise all keys.
  bool causal = true;
  /// Position of the first query among the keys; -1 stands for S - T: the queries are the last tokens.
  index_t first_query = -1;
};

template <class Backend>
struct attention_on;

namespace detail {

template <storage_scalar T, memory_space M>
attention_shape shape_of(view<T const, 4, M> q, view<T const, 4, M> k, view<T const, 4, M> v,
                         view<T const, 4, M> out, view<float const, 3, M> log_sum_exp,
                         attention_options options, site where) {
  attention_shape shape{q.extent(0), q.extent(1),         k.extent(1),   q.extent(2),   k.extent(2),
                        q.extent(3), options.first_query, options.scale, options.causal};
  if (shape.key_heads < 1 ? shape.heads != 0 : shape.heads % shape.key_heads != 0)
    throw size_error("E-ops-103", where, "attention: ", shape.heads, " query heads do not divide among ",
                     shape.key_heads, " key heads");
  extents<4> const query_sizes{shape.batch, shape.queries, shape.heads, shape.width};
  extents<4> const key_sizes{shape.batch, shape.keys, shape.key_heads, shape.width};
  require_dense_rows("attention", "q", q, where);
  require_rows("attention", "k", k, key_sizes, where);
  require_rows("attention", "v", v, key_sizes, where);
  require_rows("attention", "out", out, query_sizes, where);
  require_extents("attention", "log_sum_exp", log_sum_exp, {shape.batch, shape.heads, shape.queries}, where);
  require_contiguous("attention", "log_sum_exp", log_sum_exp, where);
  if (shape.first_query < 0) shape.first_query = shape.keys - shape.queries;
  if (shape.causal && shape.first_query < 0)
    throw size_error("E-ops-104", where, "attention: ", shape.queries, " causal queries and only ",
                     shape.keys, " keys; say first_query");
  if (shape.scale == 0 && shape.width > 0) shape.scale = 1 / std::sqrt(static_cast<float>(shape.width));
  return shape;
}

} // namespace detail

/// out[B, T, H, D] = softmax(scale q k^T) v for each head; query head h reads key head h / (H / K).
/// log_sum_exp[B, H, T] receives the logarithm of each query's sum of exponentials, for the backward.
/// A query that sees no key gives zeros.
template <exec::space Ex, storage_scalar T>
void attention(Ex& ex, view<T, 4, typename Ex::memory> out, view<float, 3, typename Ex::memory> log_sum_exp,
               input<T, 4, typename Ex::memory> q, input<T, 4, typename Ex::memory> k,
               input<T, 4, typename Ex::memory> v, attention_options options = {},
               site where = site::here()) {
  auto const shape = detail::shape_of<T, typename Ex::memory>(q, k, v, out, log_sum_exp, options, where);
  attention_on<typename Ex::backend>::forward(ex, out, log_sum_exp, q, k, v, shape);
}

/// The gradients dq[B, T, H, D], dk and dv[B, S, K, D] of `attention`, overwritten, given d_out[B, T, H, D]
/// and what the forward read and wrote, with the same options.
template <exec::space Ex, storage_scalar T>
void attention_backward(Ex& ex, view<T, 4, typename Ex::memory> dq, view<T, 4, typename Ex::memory> dk,
                        view<T, 4, typename Ex::memory> dv, input<T, 4, typename Ex::memory> d_out,
                        input<T, 4, typename Ex::memory> q, input<T, 4, typename Ex::memory> k,
                        input<T, 4, typename Ex::memory> v, input<T, 4, typename Ex::memory> out,
                        input<float, 3, typename Ex::memory> log_sum_exp, attention_options options = {},
                        site where = site::here()) {
  auto const shape = detail::shape_of<T, typename Ex::memory>(q, k, v, out, log_sum_exp, options, where);
  require_rows("attention_backward", "dq", dq, q.extents(), where);
  require_rows("attention_backward", "dk", dk, k.extents(), where);
  require_rows("attention_backward", "dv", dv, v.extents(), where);
  require_rows("attention_backward", "d_out", d_out, q.extents(), where);
  attention_on<typename Ex::backend>::backward(ex, dq, dk, dv, d_out, q, k, v, out, log_sum_exp, shape);
}

} // namespace tessera::inline TESSERA_ABI::ops

#include <tessera/ops/host/attention.hpp>

#endif
