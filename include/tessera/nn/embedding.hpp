/// The first unit: rows of a table looked up by token, learned positions added (GPT-2), then dropout. Of
/// several tensor-parallel ranks each holds some of the table's rows, and the sum of all is the embedding.
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

/// The embedding's parameters on this rank. A tied head whose stage of a pipeline lacks the embedding knows
/// from them what it borrows.
template <class Group>
layout::parameter_map embedding_parameters(transformer_config const& config, Group const& group) {
  using enum layout::parameter_kind;
  auto const part = tensor_part_of(group);
  auto const gpt2 = config.family == transformer_family::gpt2;
  auto const start = layout::normal_values(config.initial_deviation);
  layout::parameter_map map;
  map.add(gpt2 ? "wte.weight" : "model.embed_tokens.weight", {config.vocabulary_size, config.width},
          token_embedding, start, part.cut(0, config.vocabulary_size));
  if (gpt2)
    map.add("wpe.weight", {config.sequence_length, config.width}, position_embedding, start, part.copy());
  return map;
}

namespace detail {
struct nothing_kept {};
} // namespace detail

template <exec::space Ex, storage_scalar T, storage_scalar G, rank_group<Ex> Group = one_rank>
class embedding final : public detail::described_unit<Ex, T, G, detail::nothing_kept> {
public:
  using memory = typename Ex::memory;
  using rows = residual_rows<memory>;
  using typename unit<Ex, T, G>::blocks;

  static constexpr char const* unit_name = "embedding";

  /// Of a model of a valid config. `head_here`: a tied head is lent this unit's own block, and has written
  /// the table's gradient before this unit's backward, which then adds to it.
  explicit embedding(transformer_config const& config, Group const& group = {}, bool head_here = true)
      : detail::described_unit<Ex, T, G, detail::nothing_kept>(unit_name), group_(group),
        dropout_(config.dropout), shared_(config.tied_head && head_here), vocabulary_(config.vocabulary_size),
        longest_(config.sequence_length) {
    this->map_ = embedding_parameters(config, group);
    table_ = detail::place_of(this->map_[0]);
    if (this->map_.size() > 1) positions_ = detail::place_of(this->map_[1]);
  }

  index_t kept_bytes(batch_shape shape) const override {
    return detail::planned_bytes<memory>([&](auto& plan) { take_rows(plan, tokens_of(shape)); });
  }
  index_t scratch_bytes(batch_shape shape) const override {
    return detail::planned_bytes<memory>([&](auto& plan) { take_room(plan, tokens_of(shape), {}); });
  }

  /// Throws size_error for a token outside the vocabulary, a position beyond the config's sequence length, or
  /// tokens that are not this rank's part of the samples.
  void forward(Ex& ex, blocks const& lent, stream<Ex, T>& s, arena<memory>& activations,
               pass const& p) override {
    this->check_weights(lent);
    auto const shape = s.shape();
    check_tokens(s);
    s.hidden = take_rows(activations, tokens_of(shape));
    {
      arena_scope const scope(activations);
      auto const room = take_room(activations, tokens_of(shape), s.hidden);
      // Each rank's summand: its rows of the table, and on the first one the positions.
      auto const places = group_.tensor_rank() == 0 ? positions_ : detail::place();
      ops::embedding(ex, room, s.tokens, table_.matrix<memory>(lent.weights),
                     places.template matrix<memory>(lent.weights),
                     {.positions = positions_of(group_, shape.sequence_length, s.first_position),
                      .first_token = first_token(),
                      .vocabulary = vocabulary_});
      group_.reduce(ex, s.hidden, room);
    }
    if (drops(p)) ops::dropout(ex, s.hidden, s.hidden, dropout_of(s, p));
  }

  /// All of it is done in part `input`.
  void backward(Ex& ex, blocks const& lent, stream<Ex, T>& s, arena<memory>& activations,
                pass const& p) override {
    if (p.part == backward_part::weights) return;
    this->check_gradients(lent);
    auto const shape = s.shape();
    arena_scope const scope(activations);
    if (drops(p)) ops::dropout(ex, s.gradient, s.gradient, dropout_of(s, p));
    auto const room = take_room(activations, tokens_of(shape), s.gradient);
    ops::embedding_backward(ex, table_.matrix<memory>(lent.gradients),
                            positions_.matrix<memory>(lent.gradients), group_.gather(ex, room, s.gradient),
                            s.tokens,
                            {.accumulate_table = p.accumulate || shared_,
                             .accumulate_positions = p.accumulate,
                             .positions = group_.positions(shape.sequence_length),
                             .first_token = first_token(),
                             .vocabulary = vocabulary_});
  }

private:
  void check_tokens(stream<Ex, T> const& s) const {
    auto const shape = s.shape();
    if (s.first_position + shape.sequence_length > longest_)
      throw size_error("E-nn-013", site::here(), "a sample reaches position ",
                       s.first_position + shape.sequence_length, ", the model was made for ", longest_,
                       "; shorten it or make the model with a larger sequence_length");
    if (auto const here = group_.local_sequence(shape.sequence_length); s.tokens.extent(1) != here)
      throw size_error("E-nn-025", site::here(), "tokens are ", text_of(s.tokens.extents()),
                       ", but of a sample of ", shape.sequence_length, " this rank holds ", here,
                       "; give it those of its positions, and the length of whole samples as "
                       "stream::whole_length");
  }

  index_t tokens_of(batch_shape shape) const {
    return shape.batch * group_.local_sequence(shape.sequence_length);
  }
  template <detail::piece_source<memory> Source>
  rows take_rows(Source& source, index_t tokens) const {
    return source.template take<residual_scalar, 2>({group_.rows(tokens).size(), table_.columns});
  }
  /// For all rows: `local` where they are all here.
  template <detail::piece_source<memory> Source>
  rows take_room(Source& source, index_t tokens, rows local) const {
    if (!group_.sequence_parallel()) return local;
    return source.template take<residual_scalar, 2>({tokens, table_.columns});
  }

  index_t first_token() const { return tensor_part_of(group_).of(vocabulary_).begin; }
  bool drops(pass const& p) const noexcept { return p.training && dropout_ > 0; }
  ops::dropout_options dropout_of(stream<Ex, T> const& s, pass const& p) const {
    return detail::dropout_of(dropout_, 0, group_, s.shape(), p);
  }

  [[no_unique_address]] Group group_;
  float dropout_;
  bool shared_;
  index_t vocabulary_, longest_;
  detail::place table_, positions_;
};

} // namespace tessera::inline TESSERA_ABI::nn

#endif
