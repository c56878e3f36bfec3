/// Attention over one key head: what one worker does, on memory that is linear in the number of keys.
///
/// Scores S = scale q k^T are made for one register tile of queries and one block of keys at a time. Forward
/// keeps a running maximum and sum for each query (online softmax) and rescales its output row when the
/// maximum grows. Backward makes P = exp(S - log_sum_exp) again, and with delta = sum(d_out * out) of a query
///     dS = P * (d_out v^T - delta),   dq = scale dS k,   dk = dS^T (scale q),   dv = P^T d_out.
#ifndef TESSERA_OPS_HOST_DETAIL_ATTENTION_HEAD_HPP
#define TESSERA_OPS_HOST_DETAIL_ATTENTION_HEAD_HPP

#include <cmath>

#include <tessera/exec/host.hpp>
#include <tessera/ops/detail/attention_shape.hpp>
#include <tessera/ops/elementary.hpp>
#include <tessera/ops/host/detail/convert.hpp>
#include <tessera/ops/host/detail/loops.hpp>
#include <tessera/ops/host/detail/portable_product.hpp>

namespace tessera::inline TESSERA_ABI::ops::host_detail {

/// Block sizes, and rounding to them. Rows of a block are whole tiles and its columns whole panels, so that
/// tiles never hang over; what lies beyond the last query or key is never read as a result.
struct attention_blocks {
  static constexpr index_t tile_rows = product_tuning::tile_rows, panel = product_tuning::tile_columns;
  static constexpr index_t queries = 96, keys = 96;
  static_assert(queries % tile_rows == 0 && keys % tile_rows == 0 && keys % panel == 0);

  static constexpr index_t up(index_t count, index_t unit) noexcept {
    return (count + unit - 1) / unit * unit;
  }
};

/// Cuts one piece of memory into arrays.
class float_pieces {
public:
  explicit float_pieces(float* memory) noexcept : next_(memory) {}
  float* take(index_t count) noexcept {
    auto* piece = next_;
    next_ += attention_blocks::up(count, 16);
    return piece;
  }

private:
  float* next_;
};

template <storage_scalar T>
class attention_forward : attention_blocks {
public:
  static index_t floats(detail::attention_shape const& s) noexcept {
    auto const width = up(s.width, panel);
    return up(s.keys, panel) * s.width + width * s.keys + queries * s.width + tile_rows * keys +
           queries * (width + 2) + 6 * 16;
  }

  attention_forward(float* memory, detail::attention_shape const& shape, view<T const, 2> k,
                    view<T const, 2> v) noexcept
      : shape_(shape), width_(up(shape.width, panel)) {
    float_pieces pieces(memory);
    k_ = pieces.take(up(shape.keys, panel) * shape.width);
    v_ = pieces.take(width_ * shape.keys);
    q_ = pieces.take(queries * shape.width);
    score_ = pieces.take(tile_rows * keys);
    out_ = pieces.take(queries * width_);
    maximum_ = pieces.take(queries);
    sum_ = pieces.take(queries);
    pack_panels<panel>(k_, k.data(), k.stride(0), 1, shape.keys, shape.width);
    pack_panels<panel>(v_, v.data(), 1, v.stride(0), shape.width, shape.keys);
  }

  /// One query head.
  void run(view<T, 2> out, float* log_sum_exp, view<T const, 2> q) noexcept {
    for (index_t first = 0; first < shape_.queries; first += queries) {
      auto const rows = std::min(queries, shape_.queries - first);
      for (index_t i = 0; i < rows; ++i) {
        auto* row = q_ + i * shape_.width;
        convert(row, &q(first + i, 0), shape_.width);
        for (index_t d = 0; d < shape_.width; ++d) row[d] *= shape_.scale;
      }
      std::fill_n(out_, up(rows, tile_rows) * width_, 0.0f);
      std::fill_n(maximum_, rows, -std::numeric_limits<float>::infinity());
      std::fill_n(sum_, rows, 0.0f);
      auto const visible = shape_.visible(first + rows - 1);
      for (index_t key = 0; key < visible; key += keys)
        for (index_t i = 0; i < rows; i += tile_rows) tile_of(first, i, rows, key);

      for (index_t i = 0; i < rows; ++i) {
        auto* row = out_ + i * width_;
        auto const factor = sum_[i] > 0 ? 1 / sum_[i] : 0.0f;
        for (index_t d = 0; d < shape_.width; ++d) row[d] *= factor;
        convert(&out(first + i, 0), row, shape_.width);
        log_sum_exp[first + i] = maximum_[i] + std::log(sum_[i]);
      }
    }
  }

private:
  /// Queries i .. i + tile_rows of a block against the block of keys that begins at `key`.
  void tile_of(index_t first, index_t i, index_t rows, index_t key) noexcept {
    auto const end = std::min(i + tile_rows, rows);
    auto const seen = std::min(keys, shape_.visible(first + end - 1) - key);
    if (seen <= 0) return;
    for (index_t j = 0; j < seen; j += panel)
      multiply_tile<left::depth_adjacent>(score_ + j, keys, false, shape_.width, q_ + i * shape_.width,
                                          shape_.width, k_ + (key + j) * shape_.width);
    for (auto row = i; row < end; ++row) {
      auto* p = score_ + (row - i) * keys;
      auto const count = std::clamp<index_t>(shape_.visible(first + row) - key, 0, seen);
      for (auto j = count; j < seen; ++j) p[j] = 0;
      if (count == 0) continue;
      auto const top = std::max(maximum_[row], maximum(count, [p](index_t j) { return p[j]; }));
      TESSERA_SIMD()
      for (index_t j = 0; j < count; ++j) p[j] = elementary::exp(p[j] - top);
      auto const shrink = elementary::exp(maximum_[row] - top);
      sum_[row] = sum_[row] * shrink + sum(count, [p](index_t j) { return p[j]; });
      if (top > maximum_[row] && key > 0)
        for (index_t d = 0; d < width_; ++d) out_[row * width_ + d] *= shrink;
      maximum_[row] = top;
    }
    for (index_t d = 0; d < width_; d += panel)
      multiply_tile<left::depth_adjacent>(out_ + i * width_ + d, width_, true, seen, score_, keys,
                                          v_ + d * shape_.keys + key * panel);
  }

  detail::attention_shape shape_;
  index_t width_;                      ///< Filled up to whole panels.
  float *k_, *v_, *q_, *score_, *out_; ///< k_ in panels of keys, v_ in panels of its width.
  float *maximum_, *sum_;              ///< Of each query, so far.
};

template <storage_scalar T>
class attention_backward : attention_blocks {
public:
  static index_t floats(detail::attention_shape const& s) noexcept {
    auto const width = up(s.width, panel);
    return 2 * up(s.keys, panel) * s.width + width * s.keys + 2 * up(s.keys, keys) * width +
           2 * queries * s.width + 3 * queries * width + 2 * queries * keys + queries + 14 * 16;
  }

  attention_backward(float* memory, detail::attention_shape const& shape, view<T const, 2> k,
                     view<T const, 2> v) noexcept
      : shape_(shape), width_(up(shape.width, panel)) {
    float_pieces pieces(memory);
    k_by_key_ = pieces.take(up(shape.keys, panel) * shape.width);
    v_by_key_ = pieces.take(up(shape.keys, panel) * shape.width);
    k_by_width_ = pieces.take(width_ * shape.keys);
    dk_ = pieces.take(up(shape.keys, keys) * width_);
    dv_ = pieces.take(up(shape.keys, keys) * width_);
    q_ = pieces.take(queries * shape.width);
    d_out_ = pieces.take(queries * shape.width);
    q_panels_ = pieces.take(queries * width_);
    d_out_panels_ = pieces.take(queries * width_);
    dq_ = pieces.take(queries * width_);
    p_ = pieces.take(queries * keys);
    ds_ = pieces.take(queries * keys);
    delta_ = pieces.take(queries);
    pack_panels<panel>(k_by_key_, k.data(), k.stride(0), 1, shape.keys, shape.width);
    pack_panels<panel>(v_by_key_, v.data(), v.stride(0), 1, shape.keys, shape.width);
    pack_panels<panel>(k_by_width_, k.data(), 1, k.stride(0), shape.width, shape.keys);
    std::fill_n(dk_, up(shape.keys, keys) * width_, 0.0f);
    std::fill_n(dv_, up(shape.keys, keys) * width_, 0.0f);
  }

  /// One query head: writes dq and adds to the gradients of keys and values.
  void run(view<T, 2> dq, view<T const, 2> d_out, view<T const, 2> q, view<T const, 2> out,
           float const* log_sum_exp) noexcept {
    auto const width = shape_.width;
    for (index_t first = 0; first < shape_.queries; first += queries) {
      auto const rows = std::min(queries, shape_.queries - first);
      for (index_t i = 0; i < rows; ++i) {
        auto *scaled = q_ + i * width, *dy = d_out_ + i * width;
        convert(scaled, &q(first + i, 0), width);
        for (index_t d = 0; d < width; ++d) scaled[d] *= shape_.scale;
        convert(dy, &d_out(first + i, 0), width);
        auto const* y = &out(first + i, 0);
        delta_[i] = sum(width, [dy, y](index_t d) { return dy[d] * widened(y[d]); });
      }
      pack_panels<panel>(q_panels_, q_, 1, width, width, rows);
      pack_panels<panel>(d_out_panels_, d_out_, 1, width, width, rows);
      std::fill_n(dq_, up(rows, tile_rows) * width_, 0.0f);

      auto const visible = shape_.visible(first + rows - 1);
      for (index_t key = 0; key < visible; key += keys) {
        for (index_t i = 0; i < rows; i += tile_rows) query_tile(first, i, rows, key, log_sum_exp + first);
        for (index_t j = 0; j < std::min(keys, visible - key); j += tile_rows) key_tile(first, j, rows, key);
      }
      for (index_t i = 0; i < rows; ++i) {
        auto* row = dq_ + i * width_;
        for (index_t d = 0; d < width; ++d) row[d] *= shape_.scale;
        convert(&dq(first + i, 0), row, width);
      }
    }
  }

  void finish(view<T, 2> dk, view<T, 2> dv) noexcept {
    for (index_t key = 0; key < shape_.keys; ++key) {
      convert(&dk(key, 0), dk_ + key * width_, shape_.width);
      convert(&dv(key, 0), dv_ + key * width_, shape_.width);
    }
  }

private:
  /// P and dS of a tile of queries against a block of keys, and the tile's part of dq.
  void query_tile(index_t first, index_t i, index_t rows, index_t key, float const* log_sum_exp) noexcept {
    auto const width = shape_.width;
    auto const end = std::min(i + tile_rows, rows);
    auto const seen = std::clamp<index_t>(shape_.visible(first + end - 1) - key, 0, keys);
    for (index_t j = 0; j < seen; j += panel) {
      multiply_tile<left::depth_adjacent>(p_ + i * keys + j, keys, false, width, q_ + i * width, width,
                                          k_by_key_ + (key + j) * width);
      multiply_tile<left::depth_adjacent>(ds_ + i * keys + j, keys, false, width, d_out_ + i * width, width,
                                          v_by_key_ + (key + j) * width);
    }
    for (auto row = i; row < end; ++row) {
      auto *p = p_ + row * keys, *ds = ds_ + row * keys;
      auto const count = std::clamp<index_t>(shape_.visible(first + row) - key, 0, seen);
      auto const total = log_sum_exp[row], delta = delta_[row];
      TESSERA_SIMD()
      for (index_t j = 0; j < count; ++j) {
        p[j] = elementary::exp(p[j] - total);
        ds[j] = p[j] * (ds[j] - delta);
      }
      std::fill(p + count, p + keys, 0.0f);
      std::fill(ds + count, ds + keys, 0.0f);
    }
    if (seen > 0)
      for (index_t d = 0; d < width_; d += panel)
        multiply_tile<left::depth_adjacent>(dq_ + i * width_ + d, width_, true, seen, ds_ + i * keys, keys,
                                            k_by_width_ + d * shape_.keys + key * panel);
  }

  /// What the block of queries adds to the gradients of keys key + j .. key + j + tile_rows.
  void key_tile(index_t first, index_t j, index_t rows, index_t key) noexcept {
    auto const blind = shape_.causal ? key + j - shape_.first_query - first : 0; // queries before these keys
    auto const from = std::clamp<index_t>(blind, 0, rows);
    for (index_t d = 0; d < width_; d += panel) {
      auto const at = (key + j) * width_ + d, panel_at = d * rows + from * panel;
      multiply_tile<left::rows_adjacent>(dv_ + at, width_, true, rows - from, p_ + from * keys + j, keys,
                                         d_out_panels_ + panel_at);
      multiply_tile<left::rows_adjacent>(dk_ + at, width_, true, rows - from, ds_ + from * keys + j, keys,
                                         q_panels_ + panel_at);
    }
  }

  detail::attention_shape shape_;
  index_t width_;                                       ///< Filled up to whole panels.
  float *k_by_key_, *v_by_key_, *k_by_width_;           ///< In panels of keys, and of the width.
  float *dk_, *dv_;                                     ///< Summed over queries, [keys, width_].
  float *q_, *d_out_, *q_panels_, *d_out_panels_, *dq_; ///< Of a block of queries.
  float *p_, *ds_, *delta_;
};

} // namespace tessera::inline TESSERA_ABI::ops::host_detail

#endif
