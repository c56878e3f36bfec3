/// The last unit: the final norm, the product with the vocabulary's matrix (its own, or the embedding's table
/// when tied), and the loss, all logits at once never in memory (ops/linear_cross_entropy.hpp).
///
/// In training its forward already makes the gradient of that product's input and writes, or adds, that of
/// its matrix, since both need the logits, which are then gone; its backward is the final norm's. For a
/// decoder it leaves the last token's logits instead of a loss.
#ifndef TESSERA_NN_HEAD_HPP
#define TESSERA_NN_HEAD_HPP

#include <tessera/nn/detail/described_unit.hpp>
#include <tessera/nn/detail/dropout_layers.hpp>
#include <tessera/nn/norm.hpp>
#include <tessera/nn/transformer_config.hpp>
#include <tessera/ops/linear_cross_entropy.hpp>

namespace tessera::inline TESSERA_ABI::nn {

namespace detail {

template <class Norm, class Matrix>
struct head_pieces {
  Matrix in; ///< Kept by the unit before.
  typename Norm::statistics norm;
  Matrix d_normed;
};

} // namespace detail

template <exec::space Ex, storage_scalar T, storage_scalar G, norm_layer<Ex, T, G> Norm>
class head final
    : public detail::described_unit<Ex, T, G, detail::head_pieces<Norm, view<T, 2, typename Ex::memory>>> {
public:
  using memory = typename Ex::memory;
  using matrix = view<T, 2, memory>;
  using pieces = detail::head_pieces<Norm, matrix>;
  using typename unit<Ex, T, G>::blocks;

  /// Of a model of a valid config, whose first unit is `first`.
  head(transformer_config const& config, unit<Ex, T, G> const& first)
      : detail::described_unit<Ex, T, G, pieces>("head", config.tied_head ? first.name() : std::string()),
        config_(config), norm_(this->map_, config.family == transformer_family::gpt2 ? "ln_f" : "model.norm",
                               config.width, config.norm_epsilon) {
    auto& map = this->map_;
    vocabulary_ = detail::place_of(
        config.tied_head
            ? first.parameters()[0]
            : map[map.add("lm_head.weight", {config.vocabulary_size, config.width},
                          layout::parameter_kind::matrix, layout::normal_values(config.initial_deviation))]);
  }

  index_t kept_bytes(batch_shape shape) const override {
    return detail::planned_bytes<memory>([&](auto& plan) { take(plan, shape.tokens()); });
  }
  index_t scratch_bytes(batch_shape shape) const override {
    return arena<memory>::template bytes_for<T>(shape.tokens() * config_.width) +
           ops::linear_cross_entropy_scratch_bytes<T, memory>(shape.tokens(), config_.vocabulary_size);
  }

  void forward(Ex& ex, blocks const& lent, stream<Ex, T>& s, arena<memory>& activations,
               pass const& p) override {
    p.training ? this->check_gradients(lent) : this->check_weights(lent);
    auto const start = activations.mark();
    auto const vocabulary = vocabulary_.matrix<memory>(tied() ? lent.tied_weights : lent.weights);
    auto const in = s.logits.empty() ? s.hidden : last_tokens(s);
    auto kept = take(activations, in.extent(0));
    kept.in = in;
    {
      arena_scope const scope(activations);
      auto const normed = activations.template take<T, 2>(in.extents());
      norm_.forward(ex, lent.weights, normed, in, kept.norm);
      if (!s.logits.empty())
        ops::matmul(ex, s.logits, normed, vocabulary, {.transpose_b = true});
      else
        s.loss += loss_of(ex, lent, normed, vocabulary, kept.d_normed, s, activations, p);
    }
    if (p.training)
      this->slot(p) = kept;
    else
      activations.release(start);
  }

  void backward(Ex& ex, blocks const& lent, stream<Ex, T>& s, arena<memory>&, pass const& p) override {
    this->check_gradients(lent);
    auto const& kept = this->slot(p);
    norm_.backward(ex, lent.weights, lent.gradients, s.gradient, kept.d_normed, kept.in, kept.norm,
                   {.accumulate = p.accumulate});
  }

private:
  bool tied() const noexcept { return config_.tied_head; }

  template <detail::piece_source<memory> Source>
  pieces take(Source& source, index_t rows) const {
    pieces taken;
    taken.norm = norm_.take(source, rows);
    taken.d_normed = source.template take<T, 2>({rows, config_.width});
    return taken;
  }

  loss_sum loss_of(Ex& ex, blocks const& lent, matrix normed, view<T const, 2, memory> vocabulary,
                   matrix d_normed, stream<Ex, T> const& s, arena<memory>& activations, pass const& p) const {
    ops::linear_cross_entropy_gradients<T, G, memory> gradients;
    ops::linear_cross_entropy_options<memory> options;
    if (p.training) {
      gradients = {d_normed, vocabulary_.matrix<memory>(tied() ? lent.tied_gradients : lent.gradients)};
      options = {.label_smoothing = config_.label_smoothing,
                 .z_loss = config_.z_loss,
                 .gradient_scale = p.gradient_scale,
                 .accumulate = p.accumulate};
    }
    options.totals = s.totals;
    auto const loss = ops::linear_cross_entropy(ex, gradients, normed, vocabulary, detail::flat(s.targets),
                                                options, activations);
    return {loss.sum, loss.count};
  }

  /// The hidden row of each sample's last token.
  static matrix last_tokens(stream<Ex, T> const& s) {
    auto const shape = s.shape();
    auto const width = s.hidden.extent(1);
    return {s.hidden.data() + (shape.sequence_length - 1) * width,
            {shape.batch, width},
            {shape.sequence_length * width, 1}};
  }

  transformer_config config_;
  Norm norm_;
  detail::place vocabulary_; ///< In this unit's block, or in the embedding's.
};

} // namespace tessera::inline TESSERA_ABI::nn

#endif
