/// The attention part of a transformer block, between its norm and its residual sum: one packed projection to
/// queries, keys and values, rotary positions where the family has them, causal attention, and the projection
/// back. The same for GPT-2 and Llama but for names, biases, rotation and grouped heads.
///
///     self_attention<Ex, T, G> attention(map, "h.0.attn", config);
///     auto kept = attention.take(arena, shape);
///     attention.forward(ex, weights, out, in, kept, stream, arena);
///
/// Of several tensor-parallel ranks each holds some of the heads: rows of the first matrix, columns of the
/// second. Its output, and the gradient of its input, are then summands of the ranks'. The bias of the second
/// matrix is added by the first rank alone, so that it counts once.
#ifndef TESSERA_NN_SELF_ATTENTION_HPP
#define TESSERA_NN_SELF_ATTENTION_HPP

#include <cmath>

#include <tessera/nn/detail/parameter_views.hpp>
#include <tessera/nn/detail/pieces.hpp>
#include <tessera/nn/rank_group.hpp>
#include <tessera/nn/transformer_config.hpp>
#include <tessera/nn/unit.hpp>
#include <tessera/ops/cast.hpp>
#include <tessera/ops/linear.hpp>
#include <tessera/ops/rotary.hpp>

namespace tessera::inline TESSERA_ABI::nn {

template <exec::space Ex, storage_scalar T, storage_scalar G, rank_group<Ex> Group = one_rank>
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
  struct inner_gradients {
    matrix packed;
  };

  /// Throws config_error (E-nn-024) for heads that the ranks of the group cannot share.
  self_attention(layout::parameter_map& map, std::string const& prefix, transformer_config const& config,
                 Group const& group = {})
      : self_attention(map, prefix, config, group, tensor_part_of(group),
                       head_part::of(tensor_part_of(group), config.heads, config.kv_heads())) {}

  /// Elements of a token's keys, and of its values.
  index_t cache_width() const noexcept { return key_heads_ * head_width_; }

  template <detail::piece_source<memory> Source>
  pieces take(Source& source, batch_shape shape) const {
    auto const length = group_.local_sequence(shape.sequence_length), tokens = shape.batch * length;
    return {source.template take<T, 2>({tokens, packed_width()}),
            source.template take<T, 2>({tokens, mixed_width()}),
            source.template take<float, 3>({shape.batch, heads_, length})};
  }
  template <detail::piece_source<memory> Source>
  inner_gradients take_inner(Source& source, batch_shape shape) const {
    return {source.template take<T, 2>({tokens_of(shape), packed_width()})};
  }

  index_t forward_scratch_bytes(batch_shape shape) const {
    return group_.template attention_scratch_bytes<T, memory>(sizes_of(shape));
  }
  index_t inner_scratch_bytes(batch_shape shape) const {
    return arena<memory>::template bytes_for<T>(tokens_of(shape) * mixed_width()) +
           group_.template attention_backward_scratch_bytes<T, memory>(sizes_of(shape));
  }
  /// Of `forward`, or of `backward` in one call.
  index_t scratch_bytes(batch_shape shape) const {
    auto const backward = detail::planned_bytes<memory>([&](auto& plan) { take_inner(plan, shape); }) +
                          inner_scratch_bytes(shape);
    return (std::max)(backward, forward_scratch_bytes(shape));
  }

  /// out = the projected attention of in[tokens, width]; an empty `out` is left out, and one of type T may be
  /// the memory of `in`. With a cache in `s`, keys and values are appended to it and attention sees all that
  /// it holds.
  template <storage_scalar Out>
  void forward(Ex& ex, memory_span<T const, memory> weights, view<Out, 2, memory> out, matrix_in in,
               pieces const& kept, stream<Ex, T> const& s, arena<memory>& activations) const {
    auto const shape = s.shape();
    ops::linear(ex, kept.packed, in, in_.matrix<memory>(weights), in_bias_.vector<memory>(weights));
    rotate(ex, kept.packed, shape, s.first_position, false);
    auto const all = split(kept.packed, shape);
    auto const mixed = heads_of(kept.mixed, shape);
    if (s.keys.empty()) {
      group_.attention(ex, mixed, kept.log_sum_exp, all.query, all.key, all.value, shape.sequence_length,
                       activations);
    } else {
      append(ex, s.keys, all.key, s.first_position);
      append(ex, s.values, all.value, s.first_position);
      auto const end = s.first_position + shape.sequence_length;
      ops::attention(ex, mixed, kept.log_sum_exp, all.query, cached(s.keys, end), cached(s.values, end));
    }
    if (out.data() == nullptr) return;
    auto const bias =
        group_.tensor_rank() == 0 ? out_bias_.vector<memory>(weights) : view<T const, 1, memory>();
    ops::linear(ex, out, kept.mixed, out_.matrix<memory>(weights), bias);
  }

  /// The backward in three steps, as those of a feed_forward_layer; `backward` is all of them.
  void backward_inner(Ex& ex, memory_span<T const, memory> weights, inner_gradients const& inner,
                      matrix_in d_out, pieces const& kept, batch_shape shape,
                      arena<memory>& activations) const {
    arena_scope const scope(activations);
    auto const d_mixed = activations.template take<T, 2>(kept.mixed.extents());
    ops::matmul(ex, d_mixed, d_out, out_.matrix<memory>(weights));
    auto const all = split(kept.packed, shape);
    auto const d_all = split(inner.packed, shape);
    group_.attention_backward(ex, d_all.query, d_all.key, d_all.value, heads_of(d_mixed, shape), all.query,
                              all.key, all.value, heads_of(kept.mixed, shape), kept.log_sum_exp,
                              shape.sequence_length, activations);
    rotate(ex, inner.packed, shape, 0, true);
  }

  void backward_weights(Ex& ex, memory_span<G, memory> gradients, inner_gradients const& inner,
                        matrix_in d_out, matrix_in in, pieces const& kept, bool accumulate) const {
    auto const no_weights = memory_span<T const, memory>();
    ops::linear_backward(ex, gradients_of(gradients, out_, out_bias_), d_out, kept.mixed,
                         out_.matrix<memory>(no_weights), {.accumulate = accumulate});
    ops::linear_backward(ex, gradients_of(gradients, in_, in_bias_), inner.packed, in,
                         in_.matrix<memory>(no_weights), {.accumulate = accumulate});
  }

  template <storage_scalar D>
  void backward_input(Ex& ex, memory_span<T const, memory> weights, view<D, 2, memory> d_in,
                      inner_gradients const& inner) const {
    ops::matmul(ex, d_in, inner.packed, in_.matrix<memory>(weights));
  }

  /// d_in = the gradient of `in`, given that of the output.
  void backward(Ex& ex, memory_span<T const, memory> weights, memory_span<G, memory> gradients,
                residual_rows<memory> d_in, matrix_in d_out, matrix_in in, pieces const& kept,
                batch_shape shape, arena<memory>& activations, bool accumulate) const {
    arena_scope const scope(activations);
    auto const inner = take_inner(activations, shape);
    backward_inner(ex, weights, inner, d_out, kept, shape, activations);
    backward_weights(ex, gradients, inner, d_out, in, kept, accumulate);
    backward_input(ex, weights, d_in, inner);
  }

private:
  static constexpr auto matrix_kind = layout::parameter_kind::matrix;
  using by_head = view<T, 4, memory>; ///< [batch, sequence, heads, head_width]

  struct query_key_value {
    by_head query, key, value;
  };

  self_attention(layout::parameter_map& map, std::string const& prefix, transformer_config const& config,
                 Group const& group, tensor_part part, head_part heads)
      : group_(group), heads_(heads.queries.size()), key_heads_(heads.keys.size()),
        head_width_(config.head_width()),
        rotary_theta_(config.family == transformer_family::llama ? config.rotary_theta : 0) {
    using enum layout::parameter_kind;
    auto const width = config.width, key_width = config.kv_heads() * head_width_;
    auto const start = layout::normal_values(config.initial_deviation);
    auto const residual_start =
        layout::normal_values(config.initial_deviation / std::sqrt(2 * static_cast<float>(config.layers)));
    auto const rows_of = [&](layout::range of, index_t before) {
      return layout::range{before + of.begin * head_width_, before + of.end * head_width_};
    };
    auto const queries = rows_of(heads.queries, 0), keys = rows_of(heads.keys, 0);
    if (config.family == transformer_family::gpt2) {
      auto const zeros = layout::constant_values(0);
      auto const rows =
          part.cut(0, {queries, rows_of(heads.keys, width), rows_of(heads.keys, width + key_width)});
      index_t const packed = width + 2 * key_width;
      in_ = detail::place_of(
          map[map.add(prefix + ".c_attn.weight", {packed, width}, matrix_kind, start, rows)]);
      in_bias_ = detail::place_of(map[map.add(prefix + ".c_attn.bias", {packed}, bias, zeros, rows)]);
      out_ = detail::place_of(map[map.add(prefix + ".c_proj.weight", {width, width}, matrix_kind,
                                          residual_start, part.cut(1, {queries}))]);
      out_bias_ = detail::place_of(map[map.add(prefix + ".c_proj.bias", {width}, bias, zeros, part.copy())]);
    } else {
      auto const query =
          map.add(prefix + ".q_proj.weight", {width, width}, matrix_kind, start, part.cut(0, {queries}));
      auto const key_rows = part.cut(0, {keys}, heads.copies);
      map.add_joined(prefix + ".k_proj.weight", {key_width, width}, matrix_kind, start, key_rows);
      map.add_joined(prefix + ".v_proj.weight", {key_width, width}, matrix_kind, start, key_rows);
      in_ = {map[query].offset, packed_width(), width};
      out_ = detail::place_of(map[map.add(prefix + ".o_proj.weight", {width, width}, matrix_kind,
                                          residual_start, part.cut(1, {queries}))]);
    }
  }

  index_t packed_width() const noexcept { return (heads_ + 2 * key_heads_) * head_width_; }
  index_t mixed_width() const noexcept { return heads_ * head_width_; }
  index_t tokens_of(batch_shape shape) const {
    return shape.batch * group_.local_sequence(shape.sequence_length);
  }
  attention_sizes sizes_of(batch_shape shape) const noexcept {
    return {shape.batch, shape.sequence_length, heads_, key_heads_, head_width_};
  }

  /// Heads [first, first + count) of rows that hold nothing but heads.
  by_head heads_of(matrix rows, batch_shape shape, index_t first, index_t count) const {
    auto const row = rows.extent(1), length = group_.local_sequence(shape.sequence_length);
    return {rows.data() + first * head_width_,
            {shape.batch, length, count, head_width_},
            {length * row, row, head_width_, 1}};
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
                  {.theta = rotary_theta_,
                   .positions = positions_of(group_, shape.sequence_length, first_position),
                   .inverse = inverse});
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

  static ops::linear_gradients<T, G, memory> gradients_of(memory_span<G, memory> gradients,
                                                          detail::place weight, detail::place bias) {
    return {{}, weight.matrix<memory>(gradients), bias.vector<memory>(gradients)};
  }

  [[no_unique_address]] Group group_;
  index_t heads_, key_heads_, head_width_; ///< Heads that are here.
  float rotary_theta_;                     ///< 0: no rotation.
  detail::place in_, in_bias_, out_, out_bias_;
};

} // namespace tessera::inline TESSERA_ABI::nn

#endif
