/// One block of a pre-norm transformer as a unit:
///
///     middle = in + dropout(attention(norm(in)))
///     out = middle + dropout(feed_forward(norm(middle)))
///
/// gpt2_block and llama_block fill in the norm and the feed-forward part. The first residual sum is made in
/// the pass of the norm that follows it; the backward needs no pass of its own for either sum, since both
/// norms add their gradient to the one that flows past them.
///
/// Keeps, a token: the output and `middle` in fp32, as the residual stream flows, and in elements of T GPT-2
/// 14 width (inner width 4 width), Llama 3 width + 3 inner + packed queries, keys and values. With attention
/// recomputed what attention made is not among them (GPT-2: 5 width less); with the unit recomputed the
/// output is all. Of n tensor-parallel ranks each keeps 1/n of what is as wide as heads or inner width, and
/// with sequence parallelism 1/n of everything: what all ranks need of the rest is gathered again in the
/// backward.
#ifndef TESSERA_NN_TRANSFORMER_BLOCK_HPP
#define TESSERA_NN_TRANSFORMER_BLOCK_HPP

#include <algorithm>

#include <tessera/nn/detail/block_pieces.hpp>
#include <tessera/nn/detail/described_unit.hpp>
#include <tessera/nn/detail/dropout_layers.hpp>
#include <tessera/nn/feed_forward.hpp>
#include <tessera/nn/norm.hpp>
#include <tessera/nn/self_attention.hpp>
#include <tessera/ops/add.hpp>
#include <tessera/ops/cast.hpp>
#include <tessera/ops/dropout.hpp>

namespace tessera::inline TESSERA_ABI::nn {

template <exec::space Ex, storage_scalar T, storage_scalar G, norm_layer<Ex, T, G> Norm,
          feed_forward_layer<Ex, T, G> FeedForward, rank_group<Ex> Group = one_rank>
class transformer_block final
    : public detail::described_unit<
          Ex, T, G,
          detail::block_pieces<Norm, self_attention<Ex, T, G, Group>, FeedForward, T, typename Ex::memory>> {
public:
  using memory = typename Ex::memory;
  using matrix = view<T, 2, memory>;
  using rows = residual_rows<memory>;
  using pieces = detail::block_pieces<Norm, self_attention<Ex, T, G, Group>, FeedForward, T, memory>;
  using typename unit<Ex, T, G>::blocks;

  /// Block number `layer` of a model of a valid config. Throws config_error (E-nn-024) for heads that the
  /// ranks of the group cannot share.
  transformer_block(transformer_config const& config, index_t layer, Group const& group = {})
      : transformer_block(config, layer, group, detail::block_names::of(config.family, layer)) {}

  void recompute(recomputation what) override { recompute_ = what; }

  index_t kept_bytes(batch_shape shape) const override {
    return detail::planned_bytes<memory>([&](auto& plan) {
      pieces taken;
      take_out(plan, shape, taken);
      take_kept(plan, shape, taken);
    });
  }
  index_t kept_for_weights_bytes(batch_shape shape) const override {
    return detail::planned_bytes<memory>([&](auto& plan) {
      pieces taken;
      take_again(plan, shape, taken);
      take_for_weights(plan, shape, taken);
    });
  }
  index_t scratch_bytes(batch_shape shape) const override {
    auto const bytes_of = [](auto&& take) { return detail::planned_bytes<memory>(take); };
    auto const again = bytes_of([&](auto& plan) {
      pieces taken;
      take_again(plan, shape, taken);
    });
    auto const room = bytes_of([&](auto& plan) { take_room(plan, shape); });
    auto const gathered =
        group_.sequence_parallel() ? arena<memory>::template bytes_for<T>(tokens_of(shape) * width_) : 0;
    auto const attention = bytes_of([&](auto& plan) { attention_.take_inner(plan, shape); }) +
                           (std::max)(gathered, attention_.inner_scratch_bytes(shape));
    auto const feed_forward =
        bytes_of([&](auto& plan) { feed_forward_.take_inner(plan, tokens_of(shape)); }) +
        (std::max)(gathered, feed_forward_.inner_scratch_bytes(tokens_of(shape)));
    return again + room + (std::max)({attention, feed_forward, attention_.forward_scratch_bytes(shape)});
  }

  index_t cache_width() const override { return attention_.cache_width(); }

  void forward(Ex& ex, blocks const& lent, stream<Ex, T>& s, arena<memory>& activations,
               pass const& p) override {
    this->check_weights(lent);
    auto const start = activations.mark();
    pieces now;
    now.in = now.out = s.hidden; // nobody needs the input again without training
    if (p.training) {
      take_out(activations, s.shape(), now);
      take_kept(activations, s.shape(), now);
    }
    {
      arena_scope const scope(activations);
      take_again(activations, s.shape(), now);
      if (!p.training) take_kept(activations, s.shape(), now);
      auto const room = take_room(activations, s.shape());
      attend_and_join(ex, lent, room, now, s, activations, p);
      auto const branch = sum_over_ranks(ex, room, [&](auto summand) { feed(ex, lent, summand, room, now); });
      if (drops(p))
        ops::dropout_add(ex, now.out, now.second.middle, branch, dropout_of(1, s, p));
      else
        ops::add(ex, detail::flat(now.out), detail::flat(now.second.middle), detail::flat(branch));
    }
    s.hidden = now.out;
    if (p.training)
      this->slot(p) = now;
    else
      activations.release(start);
  }

  void backward(Ex& ex, blocks const& lent, stream<Ex, T>& s, arena<memory>& activations,
                pass const& p) override {
    auto& now = this->slot(p);
    if (p.part == backward_part::weights) {
      this->check_only_gradients(lent);
      feed_forward_weights(ex, lent, now.d_second, now, activations, p);
      attention_weights(ex, lent, now.d_first, now, activations, p);
      return;
    }
    this->check_gradients(lent);
    auto const start = activations.mark();
    auto const later = p.part == backward_part::input;
    take_again(activations, s.shape(), now);
    if (later) take_for_weights(activations, s.shape(), now);
    {
      arena_scope const scope(activations);
      auto const room = take_room(activations, s.shape());
      run_again(ex, lent, room, now, s, activations, p);
      feed_forward_backward(ex, lent, room, now, s, activations, p, later);
      attention_backward(ex, lent, room, now, s, activations, p, later);
    }
    if (!later) activations.release(start);
  }

private:
  /// Memory for all rows of this rank's tokens, of which one use follows the other: sums of products, and
  /// operands, which are the same memory where T is the residual stream's type.
  struct working_rows {
    rows sums;
    matrix operands;
  };

  transformer_block(transformer_config const& config, index_t layer, Group const& group,
                    detail::block_names const& names)
      : detail::described_unit<Ex, T, G, pieces>("block." + std::to_string(layer)), group_(group),
        layer_(layer), width_(config.width), dropout_(config.dropout),
        norm_1_(this->map_, names.norm_1, config.width, config.norm_epsilon, tensor_part_of(group)),
        attention_(this->map_, names.attention, config, group),
        norm_2_(this->map_, names.norm_2, config.width, config.norm_epsilon, tensor_part_of(group)),
        feed_forward_(this->map_, names.feed_forward, config, tensor_part_of(group)) {}

  // Forward.

  /// This rank's rows, in room.sums, of the sum of all ranks' summands: `product(out)` writes one. Ranks
  /// exchange them in T.
  template <detail::writes_either<rows, matrix> Product>
  rows sum_over_ranks(Ex& ex, working_rows room, Product&& product) const {
    auto const mine = rows_of(room.sums);
    if constexpr (std::same_as<T, residual_scalar> || std::same_as<Group, one_rank>) {
      product(room.sums);
      group_.reduce(ex, mine, room.sums);
    } else if (group_.tensor_ranks() == 1) {
      product(room.sums);
    } else {
      auto const exchanged = rows_of(room.operands);
      product(room.operands);
      group_.reduce(ex, exchanged, room.operands);
      ops::cast(ex, detail::flat(mine), detail::flat(exchanged));
    }
    return mine;
  }

  /// out = attention(norm(in)), this rank's summand; without `out`, the pieces only.
  template <storage_scalar Out>
  void attend(Ex& ex, blocks const& lent, view<Out, 2, memory> out, working_rows room, pieces const& now,
              stream<Ex, T> const& s, arena<memory>& activations) const {
    norm_1_.forward(ex, lent.weights, now.first.normed, now.in, now.first.norm);
    attention_.forward(ex, lent.weights, out, group_.gather(ex, room.operands, now.first.normed),
                       now.first.attention, s, activations);
  }
  /// middle = in + dropout(attention(norm(in))), and its norm.
  void attend_and_join(Ex& ex, blocks const& lent, working_rows room, pieces const& now,
                       stream<Ex, T> const& s, arena<memory>& activations, pass const& p) const {
    auto const branch =
        sum_over_ranks(ex, room, [&](auto summand) { attend(ex, lent, summand, room, now, s, activations); });
    auto const& to = now.second;
    if (drops(p)) {
      ops::dropout_add(ex, to.middle, now.in, branch, dropout_of(0, s, p));
      norm_2_.forward(ex, lent.weights, to.normed, to.middle, to.norm);
    } else {
      norm_2_.forward_sum(ex, lent.weights, to.normed, to.middle, now.in, branch, to.norm);
    }
  }
  /// out = feed_forward(norm(middle)), likewise.
  template <storage_scalar Out>
  void feed(Ex& ex, blocks const& lent, view<Out, 2, memory> out, working_rows room,
            pieces const& now) const {
    feed_forward_.forward(ex, lent.weights, out, group_.gather(ex, room.operands, now.second.normed),
                          now.second.feed_forward);
  }
  void run_again(Ex& ex, blocks const& lent, working_rows room, pieces const& now, stream<Ex, T> const& s,
                 arena<memory>& activations, pass const& p) const {
    if (recompute_ == recomputation::attention) attend(ex, lent, rows(), room, now, s, activations);
    if (recompute_ != recomputation::unit) return;
    attend_and_join(ex, lent, room, now, s, activations, p);
    feed(ex, lent, rows(), room, now);
  }

  // Backward. Each branch adds the gradient of its input to s.gradient.

  void feed_forward_backward(Ex& ex, blocks const& lent, working_rows room, pieces& now,
                             stream<Ex, T> const& s, arena<memory>& activations, pass const& p,
                             bool later) const {
    arena_scope const scope(activations);
    auto& d = now.d_second;
    if (!later) d = {room.operands, feed_forward_.take_inner(activations, room.operands.extent(0))};
    d.d_out = gradient_of_branch(ex, d.d_out, later, 1, s, p);
    feed_forward_.backward_inner(ex, lent.weights, d.inner, d.d_out, now.second.feed_forward, activations);
    if (!later) feed_forward_weights(ex, lent, d, now, activations, p);
    auto const d_normed = sum_over_ranks(
        ex, room, [&](auto summand) { feed_forward_.backward_input(ex, lent.weights, summand, d.inner); });
    norm_2_.backward(ex, lent.weights, lent.gradients, s.gradient, d_normed, now.second.middle,
                     now.second.norm, {.accumulate = p.accumulate, .accumulate_input = true});
  }
  void attention_backward(Ex& ex, blocks const& lent, working_rows room, pieces& now, stream<Ex, T> const& s,
                          arena<memory>& activations, pass const& p, bool later) const {
    arena_scope const scope(activations);
    auto& d = now.d_first;
    if (!later) d = {room.operands, attention_.take_inner(activations, s.shape())};
    d.d_out = gradient_of_branch(ex, d.d_out, later, 0, s, p);
    attention_.backward_inner(ex, lent.weights, d.inner, d.d_out, now.first.attention, s.shape(),
                              activations);
    if (!later) attention_weights(ex, lent, d, now, activations, p);
    auto const d_normed = sum_over_ranks(
        ex, room, [&](auto summand) { attention_.backward_input(ex, lent.weights, summand, d.inner); });
    norm_1_.backward(ex, lent.weights, lent.gradients, s.gradient, d_normed, now.in, now.first.norm,
                     {.accumulate = p.accumulate, .accumulate_input = true});
  }

  void feed_forward_weights(Ex& ex, blocks const& lent, decltype(pieces::d_second) const& d,
                            pieces const& now, arena<memory>& activations, pass const& p) const {
    arena_scope const scope(activations);
    auto const in = gathered(ex, now.second.normed, d.d_out, activations);
    feed_forward_.backward_weights(ex, lent.gradients, d.inner, d.d_out, in, now.second.feed_forward,
                                   p.accumulate);
  }
  void attention_weights(Ex& ex, blocks const& lent, decltype(pieces::d_first) const& d, pieces const& now,
                         arena<memory>& activations, pass const& p) const {
    arena_scope const scope(activations);
    auto const in = gathered(ex, now.first.normed, d.d_out, activations);
    attention_.backward_weights(ex, lent.gradients, d.inner, d.d_out, in, now.first.attention, p.accumulate);
  }

  /// All rows, as many as `like` has; in memory of the arena where they are not all here.
  matrix gathered(Ex& ex, matrix local, matrix like, arena<memory>& activations) const {
    matrix room;
    if (group_.sequence_parallel()) room = activations.template take<T, 2>(like.extents());
    return group_.gather(ex, room, local);
  }

  /// The gradient of a branch's output, all rows, as products read it: s.gradient behind the branch's
  /// dropout. In `room` where it is not s.gradient itself, and always where it must stay longer than that.
  matrix gradient_of_branch(Ex& ex, matrix room, bool stays, index_t branch, stream<Ex, T> const& s,
                            pass const& p) const {
    auto const mine = rows_of(room);
    if (drops(p)) {
      ops::dropout(ex, mine, s.gradient, dropout_of(branch, s, p));
    } else {
      if constexpr (std::same_as<T, residual_scalar>)
        if (!stays) return group_.gather(ex, room, s.gradient);
      ops::cast(ex, detail::flat(mine), detail::flat(s.gradient));
    }
    return group_.gather(ex, room, mine);
  }

  // Memory.

  index_t tokens_of(batch_shape shape) const {
    return shape.batch * group_.local_sequence(shape.sequence_length);
  }
  template <storage_scalar U>
  view<U, 2, memory> rows_of(view<U, 2, memory> all) const {
    auto const mine = group_.rows(all.extent(0));
    return all.slice(0, mine.begin, mine.end);
  }
  /// All rows of this rank's tokens.
  template <storage_scalar U, detail::piece_source<memory> Source>
  view<U, 2, memory> take_all(Source& source, batch_shape shape) const {
    return source.template take<U, 2>({tokens_of(shape), width_});
  }
  template <detail::piece_source<memory> Source>
  working_rows take_room(Source& source, batch_shape shape) const {
    auto const sums = take_all<residual_scalar>(source, shape);
    if constexpr (std::same_as<T, residual_scalar>)
      return {sums, sums};
    else
      return {sums, take_all<T>(source, shape)};
  }
  template <storage_scalar U, detail::piece_source<memory> Source>
  view<U, 2, memory> take_rows(Source& source, batch_shape shape) const {
    return source.template take<U, 2>({group_.rows(tokens_of(shape)).size(), width_});
  }
  template <detail::piece_source<memory> Source>
  void take_out(Source& source, batch_shape shape, pieces& to) const {
    to.out = take_rows<residual_scalar>(source, shape);
  }
  template <detail::piece_source<memory> Source>
  void take_first(Source& source, batch_shape shape, pieces& to) const {
    to.first.normed = take_rows<T>(source, shape);
    to.first.norm = norm_1_.take(source, to.first.normed.extent(0));
    to.first.attention = attention_.take(source, shape);
  }
  template <detail::piece_source<memory> Source>
  void take_second(Source& source, batch_shape shape, pieces& to) const {
    to.second.middle = take_rows<residual_scalar>(source, shape);
    to.second.normed = take_rows<T>(source, shape);
    to.second.norm = norm_2_.take(source, to.second.normed.extent(0));
    to.second.feed_forward = feed_forward_.take(source, tokens_of(shape));
  }
  /// What a forward keeps besides its output, and what a backward makes again.
  template <detail::piece_source<memory> Source>
  void take_kept(Source& source, batch_shape shape, pieces& to) const {
    if (recompute_ == recomputation::none) take_first(source, shape, to);
    if (recompute_ != recomputation::unit) take_second(source, shape, to);
  }
  template <detail::piece_source<memory> Source>
  void take_again(Source& source, batch_shape shape, pieces& to) const {
    if (recompute_ != recomputation::none) take_first(source, shape, to);
    if (recompute_ == recomputation::unit) take_second(source, shape, to);
  }
  template <detail::piece_source<memory> Source>
  void take_for_weights(Source& source, batch_shape shape, pieces& to) const {
    to.d_first = {take_all<T>(source, shape), attention_.take_inner(source, shape)};
    to.d_second = {take_all<T>(source, shape), feed_forward_.take_inner(source, tokens_of(shape))};
  }

  bool drops(pass const& p) const noexcept { return p.training && dropout_ > 0; }
  ops::dropout_options dropout_of(index_t branch, stream<Ex, T> const& s, pass const& p) const {
    return detail::dropout_of(dropout_, 1 + 2 * layer_ + branch, group_, s.shape(), p);
  }

  [[no_unique_address]] Group group_;
  recomputation recompute_ = recomputation::none;
  index_t layer_, width_;
  float dropout_;
  Norm norm_1_;
  self_attention<Ex, T, G, Group> attention_;
  Norm norm_2_;
  FeedForward feed_forward_;
};

/// Layer norm, biases, GELU.
template <exec::space Ex, storage_scalar T, storage_scalar G, rank_group<Ex> Group = one_rank>
using gpt2_block = transformer_block<Ex, T, G, layer_norm<Ex, T, G>, gelu_feed_forward<Ex, T, G>, Group>;

/// RMS norm, rotary positions, grouped heads, SwiGLU.
template <exec::space Ex, storage_scalar T, storage_scalar G, rank_group<Ex> Group = one_rank>
using llama_block = transformer_block<Ex, T, G, rms_norm<Ex, T, G>, swiglu_feed_forward<Ex, T, G>, Group>;

} // namespace tessera::inline TESSERA_ABI::nn

#endif
