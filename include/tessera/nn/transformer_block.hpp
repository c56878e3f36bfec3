/// One block of a pre-norm transformer as a unit:
///
///     middle = in + dropout(attention(norm(in)))
///     out = middle + dropout(feed_forward(norm(middle)))
///
/// gpt2_block and llama_block fill in the norm and the feed-forward part. The first residual sum is made in
/// the pass of the norm that follows it; the backward needs no pass of its own for either sum, since both
/// norms add their gradient to the one that flows past them.
///
/// Keeps, in elements of T a token: GPT-2 16 width (inner width 4 width), Llama 5 width + 3 inner + packed
/// queries, keys and values.
#ifndef TESSERA_NN_TRANSFORMER_BLOCK_HPP
#define TESSERA_NN_TRANSFORMER_BLOCK_HPP

#include <tessera/nn/detail/described_unit.hpp>
#include <tessera/nn/detail/dropout_layers.hpp>
#include <tessera/nn/feed_forward.hpp>
#include <tessera/nn/norm.hpp>
#include <tessera/nn/self_attention.hpp>
#include <tessera/ops/add.hpp>
#include <tessera/ops/dropout.hpp>

namespace tessera::inline TESSERA_ABI::nn {

namespace detail {

template <class Norm, class Attention, class FeedForward, class Matrix>
struct block_pieces {
  typename Norm::statistics norm_1, norm_2;
  typename Attention::pieces attention;
  typename FeedForward::pieces feed_forward;
  Matrix in; ///< Kept by the unit before.
  Matrix normed_1, middle, normed_2, out;
};

/// The prefixes of a block's parameters.
struct block_names {
  std::string norm_1, attention, norm_2, feed_forward;

  static block_names of(transformer_family family, index_t layer) {
    auto const number = std::to_string(layer);
    if (family == transformer_family::gpt2) {
      auto const h = "h." + number;
      return {h + ".ln_1", h + ".attn", h + ".ln_2", h + ".mlp"};
    }
    auto const h = "model.layers." + number;
    return {h + ".input_layernorm", h + ".self_attn", h + ".post_attention_layernorm", h + ".mlp"};
  }
};

} // namespace detail

template <exec::space Ex, storage_scalar T, storage_scalar G, norm_layer<Ex, T, G> Norm,
          feed_forward_layer<Ex, T, G> FeedForward>
class transformer_block final
    : public detail::described_unit<Ex, T, G,
                                    detail::block_pieces<Norm, self_attention<Ex, T, G>, FeedForward,
                                                         view<T, 2, typename Ex::memory>>> {
public:
  using memory = typename Ex::memory;
  using matrix = view<T, 2, memory>;
  using pieces = detail::block_pieces<Norm, self_attention<Ex, T, G>, FeedForward, matrix>;
  using typename unit<Ex, T, G>::blocks;

  /// Block number `layer` of a model of a valid config.
  transformer_block(transformer_config const& config, index_t layer)
      : transformer_block(config, layer, detail::block_names::of(config.family, layer)) {}

  index_t kept_bytes(batch_shape shape) const override {
    return detail::planned_bytes<memory>([&](auto& plan) { take(plan, shape); });
  }

  index_t scratch_bytes(batch_shape shape) const override {
    auto const tokens = shape.tokens();
    auto const row = arena<memory>::template bytes_for<T>(tokens * width_);
    auto const attention = attention_.scratch_bytes(shape),
               feed_forward = feed_forward_.scratch_bytes(tokens);
    return (dropout_ > 0 ? 2 : 1) * row + (attention > feed_forward ? attention : feed_forward);
  }

  index_t cache_width() const override { return attention_.cache_width(); }

  void forward(Ex& ex, blocks const& lent, stream<Ex, T>& s, arena<memory>& activations,
               pass const& p) override {
    this->check_weights(lent);
    auto const start = activations.mark();
    auto kept = take(activations, s.shape());
    kept.in = s.hidden;
    if (!p.training) kept.out = s.hidden; // nobody needs the input again
    {
      arena_scope const scope(activations);
      auto const branch = activations.template take<T, 2>({s.shape().tokens(), width_});
      norm_1_.forward(ex, lent.weights, kept.normed_1, kept.in, kept.norm_1);
      attention_.forward(ex, lent.weights, branch, kept.normed_1, kept.attention, s);
      if (drops(p)) {
        ops::dropout_add(ex, kept.middle, kept.in, branch, dropout_of(0, s, p));
        norm_2_.forward(ex, lent.weights, kept.normed_2, kept.middle, kept.norm_2);
      } else {
        norm_2_.forward_sum(ex, lent.weights, kept.normed_2, kept.middle, kept.in, branch, kept.norm_2);
      }
      feed_forward_.forward(ex, lent.weights, branch, kept.normed_2, kept.feed_forward);
      if (drops(p))
        ops::dropout_add(ex, kept.out, kept.middle, branch, dropout_of(1, s, p));
      else
        ops::add(ex, detail::flat(kept.out), detail::flat(kept.middle), detail::flat(branch));
    }
    s.hidden = kept.out;
    if (p.training)
      this->slot(p) = kept;
    else
      activations.release(start);
  }

  void backward(Ex& ex, blocks const& lent, stream<Ex, T>& s, arena<memory>& activations,
                pass const& p) override {
    this->check_gradients(lent);
    auto const& kept = this->slot(p);
    arena_scope const scope(activations);
    auto const d_normed = activations.template take<T, 2>({s.shape().tokens(), width_});
    auto const d_dropped = drops(p) ? activations.template take<T, 2>(d_normed.extents()) : s.gradient;
    backward_options const add{.accumulate = p.accumulate, .accumulate_input = true};

    if (drops(p)) ops::dropout(ex, d_dropped, s.gradient, dropout_of(1, s, p));
    feed_forward_.backward(ex, lent.weights, lent.gradients, d_normed, d_dropped, kept.normed_2,
                           kept.feed_forward, activations, p.accumulate);
    norm_2_.backward(ex, lent.weights, lent.gradients, s.gradient, d_normed, kept.middle, kept.norm_2, add);

    if (drops(p)) ops::dropout(ex, d_dropped, s.gradient, dropout_of(0, s, p));
    attention_.backward(ex, lent.weights, lent.gradients, d_normed, d_dropped, kept.normed_1, kept.attention,
                        s.shape(), activations, p.accumulate);
    norm_1_.backward(ex, lent.weights, lent.gradients, s.gradient, d_normed, kept.in, kept.norm_1, add);
  }

private:
  transformer_block(transformer_config const& config, index_t layer, detail::block_names const& names)
      : detail::described_unit<Ex, T, G, pieces>("block." + std::to_string(layer)), layer_(layer),
        width_(config.width), dropout_(config.dropout),
        norm_1_(this->map_, names.norm_1, config.width, config.norm_epsilon),
        attention_(this->map_, names.attention, config),
        norm_2_(this->map_, names.norm_2, config.width, config.norm_epsilon),
        feed_forward_(this->map_, names.feed_forward, config) {}

  template <detail::piece_source<memory> Source>
  pieces take(Source& source, batch_shape shape) const {
    auto const tokens = shape.tokens();
    auto const row = [&] { return source.template take<T, 2>({tokens, width_}); };
    pieces taken;
    taken.norm_1 = norm_1_.take(source, tokens);
    taken.norm_2 = norm_2_.take(source, tokens);
    taken.attention = attention_.take(source, shape);
    taken.feed_forward = feed_forward_.take(source, tokens);
    taken.normed_1 = row();
    taken.middle = row();
    taken.normed_2 = row();
    taken.out = row();
    return taken;
  }

  bool drops(pass const& p) const noexcept { return p.training && dropout_ > 0; }
  ops::dropout_options dropout_of(index_t branch, stream<Ex, T> const& s, pass const& p) const {
    return detail::dropout_of(dropout_, 1 + 2 * layer_ + branch, s.shape(), p);
  }

  index_t layer_, width_;
  float dropout_;
  Norm norm_1_;
  self_attention<Ex, T, G> attention_;
  Norm norm_2_;
  FeedForward feed_forward_;
};

/// Layer norm, biases, GELU.
template <exec::space Ex, storage_scalar T, storage_scalar G>
using gpt2_block = transformer_block<Ex, T, G, layer_norm<Ex, T, G>, gelu_feed_forward<Ex, T, G>>;

/// RMS norm, rotary positions, grouped heads, SwiGLU.
template <exec::space Ex, storage_scalar T, storage_scalar G>
using llama_block = transformer_block<Ex, T, G, rms_norm<Ex, T, G>, swiglu_feed_forward<Ex, T, G>>;

} // namespace tessera::inline TESSERA_ABI::nn

#endif
