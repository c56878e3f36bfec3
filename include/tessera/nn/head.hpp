/// The last unit: the final norm, the product with the vocabulary's matrix (its own, or the embedding's table
/// when tied), and the loss, all logits at once never in memory (ops/linear_cross_entropy.hpp).
///
/// In training its forward already makes the gradient of that product's input and writes, or adds, that of
/// its matrix, since both need the logits, which are then gone; its backward is the final norm's. For a
/// decoder it leaves the last token's logits instead of a loss.
///
/// Of several tensor-parallel ranks each holds some rows of the vocabulary's matrix and no rank has all
/// logits: softmax statistics of each token are merged over the ranks. All have the same loss; the first one
/// counts it.
#ifndef TESSERA_NN_HEAD_HPP
#define TESSERA_NN_HEAD_HPP

#include <tessera/nn/detail/described_unit.hpp>
#include <tessera/nn/detail/dropout_layers.hpp>
#include <tessera/nn/embedding.hpp>
#include <tessera/nn/norm.hpp>
#include <tessera/nn/transformer_config.hpp>
#include <tessera/ops/linear_cross_entropy.hpp>

namespace tessera::inline TESSERA_ABI::nn {

namespace detail {

template <class Norm, class Rows>
struct head_pieces {
  Rows in; ///< Kept by the unit before.
  typename Norm::statistics norm;
  Rows d_normed;
};

} // namespace detail

template <exec::space Ex, storage_scalar T, storage_scalar G, norm_layer<Ex, T, G> Norm,
          rank_group<Ex> Group = one_rank>
class head final
    : public detail::described_unit<Ex, T, G, detail::head_pieces<Norm, residual_rows<typename Ex::memory>>> {
public:
  using memory = typename Ex::memory;
  using matrix = view<T, 2, memory>;
  using rows = residual_rows<memory>;
  using pieces = detail::head_pieces<Norm, rows>;
  using typename unit<Ex, T, G>::blocks;

  /// Of a model of a valid config. Where its head is tied, whoever runs it lends the block of the unit
  /// "embedding", which embedding_parameters describes, wherever that unit is.
  explicit head(transformer_config const& config, Group const& group = {})
      : detail::described_unit<Ex, T, G, pieces>(
            "head", config.tied_head ? embedding<Ex, T, G, Group>::unit_name : std::string()),
        group_(group), config_(config),
        norm_(this->map_, config.family == transformer_family::gpt2 ? "ln_f" : "model.norm", config.width,
              config.norm_epsilon, tensor_part_of(group)) {
    auto const here = tensor_part_of(group).of(config.vocabulary_size);
    first_class_ = here.begin;
    if (config.tied_head) {
      vocabulary_ = detail::place_of(embedding_parameters(config, group)[0]);
      return;
    }
    auto& map = this->map_;
    vocabulary_ = detail::place_of(
        map[map.add("lm_head.weight", {config.vocabulary_size, config.width}, layout::parameter_kind::matrix,
                    layout::normal_values(config.initial_deviation),
                    tensor_part_of(group).cut(0, config.vocabulary_size))]);
  }

  index_t kept_bytes(batch_shape shape) const override {
    return detail::planned_bytes<memory>([&](auto& plan) { take(plan, rows_of(shape)); });
  }
  index_t scratch_bytes(batch_shape shape) const override {
    auto const tokens = tokens_of(shape);
    return detail::planned_bytes<memory>([&](auto& plan) { take_scratch(plan, tokens, {}); }) +
           ops::linear_cross_entropy_scratch_bytes<T, memory>(tokens, vocabulary_.rows, 0, merges) +
           group_.template statistics_merge_bytes<memory>(tokens);
  }

  /// Throws config_error for a decoder that has not the whole model on one rank.
  void forward(Ex& ex, blocks const& lent, stream<Ex, T>& s, arena<memory>& activations,
               pass const& p) override {
    p.training ? this->check_gradients(lent) : this->check_weights(lent);
    auto const start = activations.mark();
    auto const in = s.logits.empty() ? s.hidden : last_tokens(s);
    auto kept = take(activations, in.extent(0));
    kept.in = in;
    {
      arena_scope const scope(activations);
      auto const all =
          take_scratch(activations, s.logits.empty() ? tokens_of(s.shape()) : in.extent(0), kept.d_normed);
      auto const mine = group_.rows(all.normed.extent(0));
      auto const normed = all.normed.slice(0, mine.begin, mine.end);
      norm_.forward(ex, lent.weights, normed, in, kept.norm);
      if (!s.logits.empty())
        last_logits(ex, lent, normed, s);
      else
        add_loss(ex, lent, group_.gather(ex, all.normed, normed), all, s, activations, p);
      if (p.training) group_.reduce(ex, kept.d_normed, all.d_normed);
    }
    if (p.training)
      this->slot(p) = kept;
    else
      activations.release(start);
  }

  /// All of it is done in part `input`.
  void backward(Ex& ex, blocks const& lent, stream<Ex, T>& s, arena<memory>&, pass const& p) override {
    if (p.part == backward_part::weights) return;
    this->check_gradients(lent);
    auto const& kept = this->slot(p);
    norm_.backward(ex, lent.weights, lent.gradients, s.gradient, kept.d_normed, kept.in, kept.norm,
                   {.accumulate = p.accumulate});
  }

private:
  using merge = decltype(std::declval<Group const&>().statistics_merge(std::declval<arena<memory>&>()));
  static constexpr bool merges = !std::same_as<merge, ops::whole_vocabulary>;

  struct scratch {
    matrix normed; ///< All rows, like the next.
    rows d_normed;
    view<double, 1, memory> uncounted; ///< Where a loss goes that the first rank counts.
  };

  bool counts() const { return group_.tensor_rank() == 0; }
  bool tied() const noexcept { return config_.tied_head; }
  index_t tokens_of(batch_shape shape) const {
    return shape.batch * group_.local_sequence(shape.sequence_length);
  }
  index_t rows_of(batch_shape shape) const { return group_.rows(tokens_of(shape)).size(); }

  template <detail::piece_source<memory> Source>
  pieces take(Source& source, index_t rows) const {
    pieces taken;
    taken.norm = norm_.take(source, rows);
    taken.d_normed = source.template take<residual_scalar, 2>({rows, config_.width});
    return taken;
  }
  /// The gradient's rows are `local` where all of them are here.
  template <detail::piece_source<memory> Source>
  scratch take_scratch(Source& source, index_t tokens, rows local) const {
    scratch taken;
    taken.normed = source.template take<T, 2>({tokens, config_.width});
    taken.d_normed = local;
    if (group_.sequence_parallel())
      taken.d_normed = source.template take<residual_scalar, 2>({tokens, config_.width});
    if (!counts()) taken.uncounted = source.template take<double, 1>({2});
    return taken;
  }

  view<T const, 2, memory> vocabulary_of(blocks const& lent) const {
    return vocabulary_.matrix<memory>(tied() ? lent.tied_weights : lent.weights);
  }

  void add_loss(Ex& ex, blocks const& lent, matrix normed, scratch const& all, stream<Ex, T>& s,
                arena<memory>& activations, pass const& p) const {
    ops::linear_cross_entropy_gradients<residual_scalar, G, memory> gradients;
    ops::linear_cross_entropy_options<memory> options;
    if (p.training) {
      gradients = {all.d_normed, vocabulary_.matrix<memory>(tied() ? lent.tied_gradients : lent.gradients)};
      options = {.label_smoothing = config_.label_smoothing,
                 .z_loss = config_.z_loss,
                 .gradient_scale = p.gradient_scale,
                 .accumulate = p.accumulate};
    }
    options.totals = counts() || s.totals.empty() ? s.totals : all.uncounted;
    options.first_class = first_class_;
    options.classes = config_.vocabulary_size;
    auto const loss_with = [&](auto&& merge) {
      return ops::linear_cross_entropy(ex, gradients, normed, vocabulary_of(lent), detail::flat(s.targets),
                                       options, activations, merge);
    };
    // A rank that has the whole vocabulary reads its logits once.
    auto const loss = group_.tensor_ranks() == 1 ? loss_with(ops::whole_vocabulary{})
                                                 : loss_with(group_.statistics_merge(activations));
    if (counts()) s.loss += {loss.sum, loss.count};
  }

  void last_logits(Ex& ex, blocks const& lent, matrix normed, stream<Ex, T> const& s) const {
    if (!group_.alone())
      throw config_error("E-nn-026", site::here(), "logits were asked of a part of a model: a decoder needs ",
                         "all units whole on one rank; make them without a group");
    ops::matmul(ex, s.logits, normed, vocabulary_of(lent), {.transpose_b = true});
  }

  /// The hidden row of each sample's last token.
  static rows last_tokens(stream<Ex, T> const& s) {
    auto const shape = s.shape();
    auto const width = s.hidden.extent(1);
    return {s.hidden.data() + (shape.sequence_length - 1) * width,
            {shape.batch, width},
            {shape.sequence_length * width, 1}};
  }

  [[no_unique_address]] Group group_;
  transformer_config config_;
  Norm norm_;
  detail::place vocabulary_; ///< In this unit's block, or in the embedding's.
  index_t first_class_;      ///< Whose row is the first that is here.
};

} // namespace tessera::inline TESSERA_ABI::nn

#endif
