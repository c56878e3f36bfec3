/// The feed-forward part of a transformer block, between its norm and its residual sum: GPT-2's two linear
/// layers with a GELU between them, or Llama's gated form. The GELU is applied inside the first product.
///
///     gelu_feed_forward<Ex, T, G> feed_forward(map, "h.0.mlp", config);
///     auto kept = feed_forward.take(arena, tokens);
///     feed_forward.forward(ex, weights, out, in, kept);
#ifndef TESSERA_NN_FEED_FORWARD_HPP
#define TESSERA_NN_FEED_FORWARD_HPP

#include <cmath>

#include <tessera/nn/detail/parameter_views.hpp>
#include <tessera/nn/detail/pieces.hpp>
#include <tessera/nn/transformer_config.hpp>
#include <tessera/ops/linear.hpp>
#include <tessera/ops/swiglu.hpp>

namespace tessera::inline TESSERA_ABI::nn {

/// A feed-forward part. Semantics: `forward` fills `out` and the pieces that `backward` reads.
template <class F, class Ex, class T, class G>
concept feed_forward_layer = requires(F const& layer, Ex& ex,
                                      memory_span<T const, typename Ex::memory> weights,
                                      memory_span<G, typename Ex::memory> gradients,
                                      view<T, 2, typename Ex::memory> x, arena<typename Ex::memory>& memory,
                                      typename F::pieces const& kept) {
  { layer.take(memory, index_t{}) } -> std::same_as<typename F::pieces>;
  { layer.scratch_bytes(index_t{}) } -> std::same_as<index_t>;
  layer.forward(ex, weights, x, x, kept);
  layer.backward(ex, weights, gradients, x, x, x, kept, memory, true);
};

/// out = gelu(in w1^T + b1) w2^T + b2
template <exec::space Ex, storage_scalar T, storage_scalar G>
class gelu_feed_forward {
public:
  using memory = typename Ex::memory;
  using matrix = view<T, 2, memory>;
  using matrix_in = view<T const, 2, memory>;

  struct pieces {
    matrix before, activated; ///< [tokens, inner]
  };

  gelu_feed_forward(layout::parameter_map& map, std::string const& prefix, transformer_config const& config) {
    using enum layout::parameter_kind;
    auto const width = config.width, inner = config.inner_width();
    auto const zeros = layout::constant_values(0);
    up_ =
        detail::place_of(map[map.add(prefix + ".c_fc.weight", {inner, width}, layout::parameter_kind::matrix,
                                     layout::normal_values(config.initial_deviation))]);
    up_bias_ = detail::place_of(map[map.add(prefix + ".c_fc.bias", {inner}, bias, zeros)]);
    down_ = detail::place_of(map[map.add(
        prefix + ".c_proj.weight", {width, inner}, layout::parameter_kind::matrix,
        layout::normal_values(config.initial_deviation / std::sqrt(2 * static_cast<float>(config.layers))))]);
    down_bias_ = detail::place_of(map[map.add(prefix + ".c_proj.bias", {width}, bias, zeros)]);
  }

  template <detail::piece_source<memory> Source>
  pieces take(Source& source, index_t tokens) const {
    return {source.template take<T, 2>({tokens, up_.rows}), source.template take<T, 2>({tokens, up_.rows})};
  }

  index_t scratch_bytes(index_t tokens) const {
    return arena<memory>::template bytes_for<T>(tokens * up_.rows);
  }

  void forward(Ex& ex, memory_span<T const, memory> weights, matrix out, matrix_in in,
               pieces const& kept) const {
    ops::linear(ex, kept.activated, in, up_.matrix<memory>(weights), up_bias_.vector<memory>(weights),
                {.activation = ops::activation::gelu_tanh, .pre_activation = kept.before});
    ops::linear(ex, out, kept.activated, down_.matrix<memory>(weights), down_bias_.vector<memory>(weights));
  }

  void backward(Ex& ex, memory_span<T const, memory> weights, memory_span<G, memory> gradients, matrix d_in,
                matrix_in d_out, matrix_in in, pieces const& kept, arena<memory>& activations,
                bool accumulate) const {
    using linear_gradients = ops::linear_gradients<T, G, memory>;
    arena_scope const scope(activations);
    auto const d_inner = activations.template take<T, 2>({in.extent(0), up_.rows});
    ops::linear_backward(
        ex, linear_gradients{d_inner, down_.matrix<memory>(gradients), down_bias_.vector<memory>(gradients)},
        d_out, kept.activated, down_.matrix<memory>(weights),
        {.accumulate = accumulate,
         .input_activation = ops::activation::gelu_tanh,
         .input_pre_activation = kept.before}); // d_inner is the gradient before the activation
    ops::linear_backward(
        ex, linear_gradients{d_in, up_.matrix<memory>(gradients), up_bias_.vector<memory>(gradients)},
        d_inner, in, up_.matrix<memory>(weights), {.accumulate = accumulate});
  }

private:
  detail::place up_, up_bias_, down_, down_bias_;
};

/// out = (silu(in gate^T) * (in up^T)) down^T; gate and up are one product.
template <exec::space Ex, storage_scalar T, storage_scalar G>
class swiglu_feed_forward {
public:
  using memory = typename Ex::memory;
  using matrix = view<T, 2, memory>;
  using matrix_in = view<T const, 2, memory>;

  struct pieces {
    matrix gate_up;   ///< [tokens, 2 inner]
    matrix activated; ///< [tokens, inner]
  };

  swiglu_feed_forward(layout::parameter_map& map, std::string const& prefix,
                      transformer_config const& config) {
    auto const width = config.width, inner = config.inner_width();
    auto const kind = layout::parameter_kind::matrix;
    auto const start = layout::normal_values(config.initial_deviation);
    auto const gate = map.add(prefix + ".gate_proj.weight", {inner, width}, kind, start);
    map.add_joined(prefix + ".up_proj.weight", {inner, width}, kind, start);
    gate_up_ = {map[gate].offset, 2 * inner, width};
    down_ = detail::place_of(map[map.add(
        prefix + ".down_proj.weight", {width, inner}, kind,
        layout::normal_values(config.initial_deviation / std::sqrt(2 * static_cast<float>(config.layers))))]);
  }

  template <detail::piece_source<memory> Source>
  pieces take(Source& source, index_t tokens) const {
    return {source.template take<T, 2>({tokens, gate_up_.rows}),
            source.template take<T, 2>({tokens, down_.columns})};
  }

  index_t scratch_bytes(index_t tokens) const {
    return detail::planned_bytes<memory>([&](auto& plan) { take(plan, tokens); });
  }

  void forward(Ex& ex, memory_span<T const, memory> weights, matrix out, matrix_in in,
               pieces const& kept) const {
    ops::linear(ex, kept.gate_up, in, gate_up_.matrix<memory>(weights), {});
    ops::swiglu(ex, kept.activated, kept.gate_up);
    ops::linear(ex, out, kept.activated, down_.matrix<memory>(weights), {});
  }

  void backward(Ex& ex, memory_span<T const, memory> weights, memory_span<G, memory> gradients, matrix d_in,
                matrix_in d_out, matrix_in in, pieces const& kept, arena<memory>& activations,
                bool accumulate) const {
    using linear_gradients = ops::linear_gradients<T, G, memory>;
    arena_scope const scope(activations);
    auto const d = take(activations, in.extent(0)); // the gradients of the pieces, of the same sizes
    ops::linear_backward(ex, linear_gradients{d.activated, down_.matrix<memory>(gradients), {}}, d_out,
                         kept.activated, down_.matrix<memory>(weights), {.accumulate = accumulate});
    ops::swiglu_backward(ex, d.gate_up, d.activated, kept.gate_up);
    ops::linear_backward(ex, linear_gradients{d_in, gate_up_.matrix<memory>(gradients), {}}, d.gate_up, in,
                         gate_up_.matrix<memory>(weights), {.accumulate = accumulate});
  }

private:
  detail::place gate_up_, down_;
};

} // namespace tessera::inline TESSERA_ABI::nn

#endif
