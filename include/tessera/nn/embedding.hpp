/// The first unit: rows of a table looked up by token, learned positions added (GPT-2), then dropout.
///
///     embedding<Ex, T, G> unit(config);       // parameters "wte.weight", "wpe.weight" or
///                                             // "model.embed_tokens.weight"
#ifndef TESSERA_NN_EMBEDDING_HPP
#define TESSERA_NN_EMBEDDING_HPP

#include <tessera/nn/detail/described_unit.hpp>
#include <tessera/nn/detail/dropout_layers.hpp>
#include <tessera/nn/transformer_config.hpp>
#include <tessera/ops/embedding.hpp>

namespace tessera::inline TESSERA_ABI::nn {

namespace detail {
struct nothing_kept {};
} // namespace detail

template <exec::space Ex, storage_scalar T, storage_scalar G>
class embedding final : public detail::described_unit<Ex, T, G, detail::nothing_kept> {
public:
  using memory = typename Ex::memory;
  using typename unit<Ex, T, G>::blocks;

  /// Of a model of a valid config.
  explicit embedding(transformer_config const& config)
      : detail::described_unit<Ex, T, G, detail::nothing_kept>("embedding"), dropout_(config.dropout),
        shared_(config.tied_head), longest_(config.sequence_length) {
    using enum layout::parameter_kind;
    auto& map = this->map_;
    auto const gpt2 = config.family == transformer_family::gpt2;
    auto const start = layout::normal_values(config.initial_deviation);
    table_ = detail::place_of(map[map.add(gpt2 ? "wte.weight" : "model.embed_tokens.weight",
                                          {config.vocabulary_size, config.width}, token_embedding, start)]);
    if (gpt2)
      positions_ = detail::place_of(
          map[map.add("wpe.weight", {config.sequence_length, config.width}, position_embedding, start)]);
  }

  index_t kept_bytes(batch_shape shape) const override {
    return arena<memory>::template bytes_for<T>(shape.tokens() * table_.columns);
  }
  index_t scratch_bytes(batch_shape) const override { return 0; }

  /// Throws size_error for a token outside the vocabulary, or a position beyond the config's sequence length.
  void forward(Ex& ex, blocks const& lent, stream<Ex, T>& s, arena<memory>& activations,
               pass const& p) override {
    this->check_weights(lent);
    auto const shape = s.shape();
    if (s.first_position + shape.sequence_length > longest_)
      throw size_error("E-nn-013", site::here(), "a sample reaches position ",
                       s.first_position + shape.sequence_length, ", the model was made for ", longest_,
                       "; shorten it or make the model with a larger sequence_length");
    s.hidden = activations.template take<T, 2>({shape.tokens(), table_.columns});
    ops::embedding(ex, s.hidden, s.tokens, table_.matrix<memory>(lent.weights),
                   positions_.matrix<memory>(lent.weights), {.positions = {.first = s.first_position}});
    if (drops(p)) ops::dropout(ex, s.hidden, s.hidden, detail::dropout_of(dropout_, 0, shape, p));
  }

  /// With a tied head, the head has written the table's gradient of this pass already.
  void backward(Ex& ex, blocks const& lent, stream<Ex, T>& s, arena<memory>&, pass const& p) override {
    this->check_gradients(lent);
    if (drops(p)) ops::dropout(ex, s.gradient, s.gradient, detail::dropout_of(dropout_, 0, s.shape(), p));
    ops::embedding_backward(
        ex, table_.matrix<memory>(lent.gradients), positions_.matrix<memory>(lent.gradients), s.gradient,
        s.tokens, {.accumulate_table = p.accumulate || shared_, .accumulate_positions = p.accumulate});
  }

private:
  bool drops(pass const& p) const noexcept { return p.training && dropout_ > 0; }

  float dropout_;
  bool shared_; ///< The head multiplies by the table too.
  index_t longest_;
  detail::place table_, positions_;
};

} // namespace tessera::inline TESSERA_ABI::nn

#endif
