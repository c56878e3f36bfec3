/// The feed-forward part of a transformer block, between its norm and its residual sum: GPT-2's two linear
/// layers with a GELU between them, or Llama's gated form. Either is applied to the first product's sums.
///
///     gelu_feed_forward<Ex, T, G> feed_forward(map, "h.0.mlp", config);
///     auto kept = feed_forward.take(arena, tokens);
///     feed_forward.forward(ex, weights, out, in, kept);
///
/// Of several tensor-parallel ranks each holds a part of the inner width: rows of the first matrix, columns
/// of the second. Its output, and the gradient of its input, are then summands of the ranks'. The bias of the
/// second matrix is added by the first rank alone, so that it counts once.
#ifndef TESSERA_NN_FEED_FORWARD_HPP
#define TESSERA_NN_FEED_FORWARD_HPP

#include <cmath>

#include <tessera/nn/detail/parameter_views.hpp>
#include <tessera/nn/detail/pieces.hpp>
#include <tessera/nn/tensor_part.hpp>
#include <tessera/nn/transformer_config.hpp>
#include <tessera/nn/unit.hpp>
#include <tessera/ops/linear.hpp>
#include <tessera/ops/linear_swiglu.hpp>

namespace tessera::inline TESSERA_ABI::nn {

/// A feed-forward part. Semantics:
/// - `forward` fills `out` and the pieces that a backward reads; an empty `out` is left out. `out` is stored
///   as the residual stream or, where ranks exchange summands, as T, and may then be the memory of `in`.
/// - A backward goes in three steps, of which the last two may come in either order, or a part of them later:
///   `backward_inner` fills `inner` from d_out; `backward_weights` makes the parameters' gradients of both;
///   `backward_input` makes d_in of `inner`. `backward` is all three.
template <class F, class Ex, class T, class G>
concept feed_forward_layer = requires(F const& layer, Ex& ex,
                                      memory_span<T const, typename Ex::memory> weights,
                                      memory_span<G, typename Ex::memory> gradients,
                                      view<T, 2, typename Ex::memory> x,
                                      residual_rows<typename Ex::memory> rows,
                                      arena<typename Ex::memory>& memory, typename F::pieces const& kept,
                                      typename F::inner_gradients const& inner) {
  { layer.take(memory, index_t{}) } -> std::same_as<typename F::pieces>;
  { layer.take_inner(memory, index_t{}) } -> std::same_as<typename F::inner_gradients>;
  { layer.inner_scratch_bytes(index_t{}) } -> std::same_as<index_t>;
  { layer.scratch_bytes(index_t{}) } -> std::same_as<index_t>;
  layer.forward(ex, weights, rows, x, kept);
  layer.forward(ex, weights, x, x, kept);
  layer.backward_inner(ex, weights, inner, x, kept, memory);
  layer.backward_weights(ex, gradients, inner, x, x, kept, true);
  layer.backward_input(ex, weights, rows, inner);
  layer.backward_input(ex, weights, x, inner);
  layer.backward(ex, weights, gradients, rows, x, x, kept, memory, true);
};

namespace detail {

/// What both forms have: the backward in one call.
template <class Layer, class Ex, class T, class G>
struct whole_feed_forward {
  using memory = typename Ex::memory;

  /// Further bytes of `backward`.
  index_t scratch_bytes(index_t tokens) const {
    return planned_bytes<memory>([&](auto& plan) { layer().take_inner(plan, tokens); }) +
           layer().inner_scratch_bytes(tokens);
  }

  void backward(Ex& ex, memory_span<T const, memory> weights, memory_span<G, memory> gradients,
                residual_rows<memory> d_in, view<T const, 2, memory> d_out, view<T const, 2, memory> in,
                auto const& kept, arena<memory>& activations, bool accumulate) const {
    arena_scope const scope(activations);
    auto const inner = layer().take_inner(activations, in.extent(0));
    layer().backward_inner(ex, weights, inner, d_out, kept, activations);
    layer().backward_weights(ex, gradients, inner, d_out, in, kept, accumulate);
    layer().backward_input(ex, weights, d_in, inner);
  }

private:
  Layer const& layer() const noexcept { return static_cast<Layer const&>(*this); }
};

} // namespace detail

/// out = gelu(in w1^T + b1) w2^T + b2
template <exec::space Ex, storage_scalar T, storage_scalar G>
class gelu_feed_forward : public detail::whole_feed_forward<gelu_feed_forward<Ex, T, G>, Ex, T, G> {
public:
  using memory = typename Ex::memory;
  using matrix = view<T, 2, memory>;
  using matrix_in = view<T const, 2, memory>;

  struct pieces {
    matrix before, activated; ///< [tokens, inner]
  };
  struct inner_gradients {
    matrix before; ///< [tokens, inner]
  };

  gelu_feed_forward(layout::parameter_map& map, std::string const& prefix, transformer_config const& config,
                    tensor_part part = {})
      : first_(part.rank == 0) {
    using enum layout::parameter_kind;
    auto const width = config.width, inner = config.inner_width();
    auto const zeros = layout::constant_values(0);
    up_ =
        detail::place_of(map[map.add(prefix + ".c_fc.weight", {inner, width}, layout::parameter_kind::matrix,
                                     layout::normal_values(config.initial_deviation), part.cut(0, inner))]);
    up_bias_ =
        detail::place_of(map[map.add(prefix + ".c_fc.bias", {inner}, bias, zeros, part.cut(0, inner))]);
    down_ = detail::place_of(map[map.add(
        prefix + ".c_proj.weight", {width, inner}, layout::parameter_kind::matrix,
        layout::normal_values(config.initial_deviation / std::sqrt(2 * static_cast<float>(config.layers))),
        part.cut(1, inner))]);
    down_bias_ = detail::place_of(map[map.add(prefix + ".c_proj.bias", {width}, bias, zeros, part.copy())]);
  }

  template <detail::piece_source<memory> Source>
  pieces take(Source& source, index_t tokens) const {
    return {source.template take<T, 2>({tokens, up_.rows}), source.template take<T, 2>({tokens, up_.rows})};
  }
  template <detail::piece_source<memory> Source>
  inner_gradients take_inner(Source& source, index_t tokens) const {
    return {source.template take<T, 2>({tokens, up_.rows})};
  }
  index_t inner_scratch_bytes(index_t) const { return 0; }

  template <storage_scalar Out>
  void forward(Ex& ex, memory_span<T const, memory> weights, view<Out, 2, memory> out, matrix_in in,
               pieces const& kept) const {
    ops::linear(ex, kept.activated, in, up_.matrix<memory>(weights), up_bias_.vector<memory>(weights),
                {.activation = ops::activation::gelu_tanh, .pre_activation = kept.before});
    if (out.data() == nullptr) return;
    auto const bias = first_ ? down_bias_.vector<memory>(weights) : view<T const, 1, memory>();
    ops::linear(ex, out, kept.activated, down_.matrix<memory>(weights), bias);
  }

  void backward_inner(Ex& ex, memory_span<T const, memory> weights, inner_gradients const& inner,
                      matrix_in d_out, pieces const& kept, arena<memory>&) const {
    ops::linear_backward(
        ex, ops::linear_gradients<T, G, memory>{inner.before, {}, {}}, d_out, kept.activated,
        down_.matrix<memory>(weights),
        {.input_activation = ops::activation::gelu_tanh, .input_pre_activation = kept.before});
  }

  void backward_weights(Ex& ex, memory_span<G, memory> gradients, inner_gradients const& inner,
                        matrix_in d_out, matrix_in in, pieces const& kept, bool accumulate) const {
    using linear_gradients = ops::linear_gradients<T, G, memory>;
    auto const no_weights = memory_span<T const, memory>();
    ops::linear_backward(
        ex, linear_gradients{{}, down_.matrix<memory>(gradients), down_bias_.vector<memory>(gradients)},
        d_out, kept.activated, down_.matrix<memory>(no_weights), {.accumulate = accumulate});
    ops::linear_backward(
        ex, linear_gradients{{}, up_.matrix<memory>(gradients), up_bias_.vector<memory>(gradients)},
        inner.before, in, up_.matrix<memory>(no_weights), {.accumulate = accumulate});
  }

  template <storage_scalar D>
  void backward_input(Ex& ex, memory_span<T const, memory> weights, view<D, 2, memory> d_in,
                      inner_gradients const& inner) const {
    ops::matmul(ex, d_in, inner.before, up_.matrix<memory>(weights));
  }

private:
  bool first_;
  detail::place up_, up_bias_, down_, down_bias_;
};

/// out = (silu(in gate^T) * (in up^T)) down^T; gate and up are one product.
template <exec::space Ex, storage_scalar T, storage_scalar G>
class swiglu_feed_forward : public detail::whole_feed_forward<swiglu_feed_forward<Ex, T, G>, Ex, T, G> {
public:
  using memory = typename Ex::memory;
  using matrix = view<T, 2, memory>;
  using matrix_in = view<T const, 2, memory>;

  struct pieces {
    matrix gate_up;   ///< [tokens, 2 inner]
    matrix activated; ///< [tokens, inner]
  };
  struct inner_gradients {
    matrix gate_up; ///< [tokens, 2 inner]
  };

  swiglu_feed_forward(layout::parameter_map& map, std::string const& prefix, transformer_config const& config,
                      tensor_part part = {}) {
    auto const width = config.width, inner = config.inner_width();
    auto const kind = layout::parameter_kind::matrix;
    auto const start = layout::normal_values(config.initial_deviation);
    auto const gate = map.add(prefix + ".gate_proj.weight", {inner, width}, kind, start, part.cut(0, inner));
    map.add_joined(prefix + ".up_proj.weight", {inner, width}, kind, start, part.cut(0, inner));
    gate_up_ = {map[gate].offset, 2 * part.of(inner).size(), width};
    down_ = detail::place_of(map[map.add(
        prefix + ".down_proj.weight", {width, inner}, kind,
        layout::normal_values(config.initial_deviation / std::sqrt(2 * static_cast<float>(config.layers))),
        part.cut(1, inner))]);
  }

  template <detail::piece_source<memory> Source>
  pieces take(Source& source, index_t tokens) const {
    return {source.template take<T, 2>({tokens, gate_up_.rows}),
            source.template take<T, 2>({tokens, down_.columns})};
  }
  template <detail::piece_source<memory> Source>
  inner_gradients take_inner(Source& source, index_t tokens) const {
    return {source.template take<T, 2>({tokens, gate_up_.rows})};
  }
  index_t inner_scratch_bytes(index_t tokens) const {
    return arena<memory>::template bytes_for<T>(tokens * down_.columns);
  }

  template <storage_scalar Out>
  void forward(Ex& ex, memory_span<T const, memory> weights, view<Out, 2, memory> out, matrix_in in,
               pieces const& kept) const {
    ops::linear_swiglu(ex, kept.activated, kept.gate_up, in, gate_up_.matrix<memory>(weights));
    if (out.data() != nullptr) ops::linear(ex, out, kept.activated, down_.matrix<memory>(weights), {});
  }

  void backward_inner(Ex& ex, memory_span<T const, memory> weights, inner_gradients const& inner,
                      matrix_in d_out, pieces const& kept, arena<memory>& activations) const {
    arena_scope const scope(activations);
    auto const d_activated = activations.template take<T, 2>(kept.activated.extents());
    ops::matmul(ex, d_activated, d_out, down_.matrix<memory>(weights));
    ops::swiglu_backward(ex, inner.gate_up, d_activated, kept.gate_up);
  }

  void backward_weights(Ex& ex, memory_span<G, memory> gradients, inner_gradients const& inner,
                        matrix_in d_out, matrix_in in, pieces const& kept, bool accumulate) const {
    using linear_gradients = ops::linear_gradients<T, G, memory>;
    auto const no_weights = memory_span<T const, memory>();
    ops::linear_backward(ex, linear_gradients{{}, down_.matrix<memory>(gradients), {}}, d_out, kept.activated,
                         down_.matrix<memory>(no_weights), {.accumulate = accumulate});
    ops::linear_backward(ex, linear_gradients{{}, gate_up_.matrix<memory>(gradients), {}}, inner.gate_up, in,
                         gate_up_.matrix<memory>(no_weights), {.accumulate = accumulate});
  }

  template <storage_scalar D>
  void backward_input(Ex& ex, memory_span<T const, memory> weights, view<D, 2, memory> d_in,
                      inner_gradients const& inner) const {
    ops::matmul(ex, d_in, inner.gate_up, gate_up_.matrix<memory>(weights));
  }

private:
  detail::place gate_up_, down_;
};

} // namespace tessera::inline TESSERA_ABI::nn

#endif
