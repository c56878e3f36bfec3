/// The attention part of a transformer block, between its norm and its residual sum: one packed projection to
/// queries, keys and values, rotary positions where the family has them, causal attention, and the projection
/// back. The same for GPT-2 and Llama but for names, biases, rotation and grouped heads.
///
///     self_attention<Ex, T, G> attention(map, "h.0.attn", config);
///     auto kept = attention.take(arena, shape);
///     attention.forward(ex, weights, out, in, kept, stream);
#ifndef TESSERA_NN_SELF_ATTENTION_HPP
#define TESSERA_NN_SELF_ATTENTION_HPP

#include <cmath>

#include <tessera/nn/detail/parameter_views.hpp>
#include <tessera/nn/detail/pieces.hpp>
#include <tessera/nn/transformer_config.hpp>
#include <tessera/nn/unit.hpp>
#include <tessera/ops/attention.hpp>
#include <tessera/ops/cast.hpp>
#include <tessera/ops/linear.hpp>
#include <tessera/ops/rotary.hpp>

namespace tessera::inline TESSERA_ABI::nn {

template <exec::space Ex, storage_scalar T, storage_scalar G>
class self_attention {
public:
  using memory = typename Ex::memory;
  using matrix = view<T, 2, memory>;
  using matrix_in = view<T const, 2, memory>;

  /// What the backward reads: queries, keys (both rotated) and values packed in rows, what attention made of
  /// them, and the logarithms of its sums.
  struct pieces {
    matrix packed, mixed;
    view<float, 3, memory> log_sum_exp;
  };

  self_attention(layout::parameter_map& map, std::string const& prefix, transformer_config const& config)
      : heads_(config.heads), key_heads_(config.kv_heads()), head_width_(config.head_width()),
        rotary_theta_(config.family == transformer_family::llama ? config.rotary_theta : 0) {
    using enum layout::parameter_kind;
    auto const width = config.width;
    auto const start = layout::normal_values(config.initial_deviation);
    auto const residual_start =
        layout::normal_values(config.initial_deviation / std::sqrt(2 * static_cast<float>(config.layers)));
    if (config.family == transformer_family::gpt2) {
      auto const zeros = layout::constant_values(0);
      in_ = detail::place_of(
          map[map.add(prefix + ".c_attn.weight", {packed_width(), width}, matrix_kind, start)]);
      in_bias_ = detail::place_of(map[map.add(prefix + ".c_attn.bias", {packed_width()}, bias, zeros)]);
      out_ = detail::place_of(
          map[map.add(prefix + ".c_proj.weight", {width, width}, matrix_kind, residual_start)]);
      out_bias_ = detail::place_of(map[map.add(prefix + ".c_proj.bias", {width}, bias, zeros)]);
    } else {
      auto const query = map.add(prefix + ".q_proj.weight", {width, width}, matrix_kind, start);
      map.add_joined(prefix + ".k_proj.weight", {cache_width(), width}, matrix_kind, start);
      map.add_joined(prefix + ".v_proj.weight", {cache_width(), width}, matrix_kind, start);
      in_ = {map[query].offset, packed_width(), width};
      out_ = detail::place_of(
          map[map.add(prefix + ".o_proj.weight", {width, width}, matrix_kind, residual_start)]);
    }
  }

  /// Elements of a token's keys, and of its values.
  index_t cache_width() const noexcept { return key_heads_ * head_width_; }

  template <detail::piece_source<memory> Source>
  pieces take(Source& source, batch_shape shape) const {
    auto const tokens = shape.tokens();
    return {source.template take<T, 2>({tokens, packed_width()}),
            source.template take<T, 2>({tokens, heads_ * head_width_}),
            source.template take<float, 3>({shape.batch, heads_, shape.sequence_length})};
  }

  index_t scratch_bytes(batch_shape shape) const {
    return detail::planned_bytes<memory>([&](auto& plan) { take_scratch(plan, shape.tokens()); });
  }

  /// out = the projected attention of in[tokens, width]. With a cache in `s`, keys and values are appended to
  /// it and attention sees all that it holds.
  void forward(Ex& ex, memory_span<T const, memory> weights, matrix out, matrix_in in, pieces const& kept,
               stream<Ex, T> const& s) const {
    auto const shape = s.shape();
    ops::linear(ex, kept.packed, in, in_.matrix<memory>(weights), in_bias_.vector<memory>(weights));
    rotate(ex, kept.packed, shape, s.first_position, false);
    auto const all = split(kept.packed, shape);
    auto const mixed = heads_of(kept.mixed, shape);
    if (s.keys.empty()) {
      ops::attention(ex, mixed, kept.log_sum_exp, all.query, all.key, all.value);
    } else {
      append(ex, s.keys, all.key, s.first_position);
      append(ex, s.values, all.value, s.first_position);
      auto const end = s.first_position + shape.sequence_length;
      ops::attention(ex, mixed, kept.log_sum_exp, all.query, cached(s.keys, end), cached(s.values, end));
    }
    ops::linear(ex, out, kept.mixed, out_.matrix<memory>(weights), out_bias_.vector<memory>(weights));
  }

  /// d_in = the gradient of `in`, given that of the output.
  void backward(Ex& ex, memory_span<T const, memory> weights, memory_span<G, memory> gradients, matrix d_in,
                matrix_in d_out, matrix_in in, pieces const& kept, batch_shape shape,
                arena<memory>& activations, bool accumulate) const {
    arena_scope const scope(activations);
    auto const [d_mixed, d_packed] = take_scratch(activations, shape.tokens());
    ops::linear_backward(ex, gradients_of(gradients, d_mixed, out_, out_bias_), d_out, kept.mixed,
                         out_.matrix<memory>(weights), {.accumulate = accumulate});
    auto const all = split(kept.packed, shape);
    auto const d_all = split(d_packed, shape);
    ops::attention_backward(ex, d_all.query, d_all.key, d_all.value, heads_of(d_mixed, shape), all.query,
                            all.key, all.value, heads_of(kept.mixed, shape), kept.log_sum_exp);
    rotate(ex, d_packed, shape, 0, true);
    ops::linear_backward(ex, gradients_of(gradients, d_in, in_, in_bias_), d_packed, in,
                         in_.matrix<memory>(weights), {.accumulate = accumulate});
  }

private:
  static constexpr auto matrix_kind = layout::parameter_kind::matrix;
  using by_head = view<T, 4, memory>; ///< [batch, sequence, heads, head_width]

  struct scratch {
    matrix d_mixed, d_packed;
  };
  struct query_key_value {
    by_head query, key, value;
  };

  index_t packed_width() const noexcept { return (heads_ + 2 * key_heads_) * head_width_; }

  template <detail::piece_source<memory> Source>
  scratch take_scratch(Source& source, index_t tokens) const {
    return {source.template take<T, 2>({tokens, heads_ * head_width_}),
            source.template take<T, 2>({tokens, packed_width()})};
  }

  /// Heads [first, first + count) of rows that hold nothing but heads.
  by_head heads_of(matrix rows, batch_shape shape, index_t first, index_t count) const {
    auto const row = rows.extent(1);
    return {rows.data() + first * head_width_,
            {shape.batch, shape.sequence_length, count, head_width_},
            {shape.sequence_length * row, row, head_width_, 1}};
  }
  by_head heads_of(matrix rows, batch_shape shape) const { return heads_of(rows, shape, 0, heads_); }
  query_key_value split(matrix packed, batch_shape shape) const {
    return {heads_of(packed, shape, 0, heads_), heads_of(packed, shape, heads_, key_heads_),
            heads_of(packed, shape, heads_ + key_heads_, key_heads_)};
  }

  /// Queries and keys stand side by side and turn together.
  void rotate(Ex& ex, matrix packed, batch_shape shape, index_t first_position, bool inverse) const {
    if (rotary_theta_ > 0)
      ops::rotary(ex, heads_of(packed, shape, 0, heads_ + key_heads_),
                  {.theta = rotary_theta_, .positions = {.first = first_position}, .inverse = inverse});
  }

  void append(Ex& ex, view<T, 3, memory> cache, by_head rows, index_t first_position) const {
    for (index_t b = 0; b < rows.extent(0); ++b)
      for (index_t t = 0; t < rows.extent(1); ++t)
        ops::cast(ex, cache[b][first_position + t], rows[b][t].template reshape<1>({cache_width()}));
  }
  by_head cached(view<T, 3, memory> cache, index_t end) const {
    return {cache.data(),
            {cache.extent(0), end, key_heads_, head_width_},
            {cache.stride(0), cache.stride(1), head_width_, 1}};
  }

  static ops::linear_gradients<T, G, memory> gradients_of(memory_span<G, memory> gradients, matrix d_in,
                                                          detail::place weight, detail::place bias) {
    return {d_in, weight.matrix<memory>(gradients), bias.vector<memory>(gradients)};
  }

  index_t heads_, key_heads_, head_width_;
  float rotary_theta_; ///< 0: no rotation.
  detail::place in_, in_bias_, out_, out_bias_;
};

} // namespace tessera::inline TESSERA_ABI::nn

#endif
