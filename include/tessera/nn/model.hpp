/// A whole model on one rank: the units, their parameters and gradients, and activation memory planned for
/// the largest micro-batch. Nothing is allocated after construction.
///
///     exec::host ex;
///     model<exec::host, bf16, float> m(config, {.batch = 4, .sequence_length = 64});
///     initialise(ex, m.store(), seed);
///     auto loss = m.forward_backward(ex, tokens, targets, {.step = 1}, [](std::size_t unit) {});
///     // m.store().gradients() is that of loss.sum: divide by the count of all micro-batches of all ranks
#ifndef TESSERA_NN_MODEL_HPP
#define TESSERA_NN_MODEL_HPP

#include <tessera/exec/copy.hpp>
#include <tessera/nn/initialise.hpp>
#include <tessera/nn/make_transformer.hpp>

namespace tessera::inline TESSERA_ABI::nn {

struct model_options {
  memory_meter* meter = nullptr;
  bool training = true; ///< False: no gradients, and activation memory for evaluation only.
};

template <exec::space Ex, storage_scalar T, storage_scalar G>
class model {
public:
  using memory = typename Ex::memory;
  using token_view = view<std::int32_t const, 2, memory>;

  /// `largest` bounds the micro-batches to come by the activation memory that they need.
  /// Throws config_error for an impossible config, size_error for a batch that is not one of the config's.
  explicit model(transformer_config const& config, batch_shape largest, model_options options = {},
                 site where = site::here())
      : config_(config), training_(options.training), units_(make_transformer<Ex, T, G>(config, where)),
        store_(units_, {.meter = options.meter, .gradients = options.training}, where),
        starts_(units_.size()), totals_({2}, {options.meter, memory_kind::other}, where) {
    check_shape(largest, where);
    activations_ =
        arena<memory>(planned_bytes(largest, training_), {options.meter, memory_kind::activations}, where);
  }

  transformer_config const& config() const noexcept { return config_; }
  unit_list<Ex, T, G>& units() noexcept { return units_; }
  parameter_store<Ex, T, G>& store() noexcept { return store_; }
  parameter_store<Ex, T, G> const& store() const noexcept { return store_; }
  arena<memory> const& activations() const noexcept { return activations_; }

  /// Activation bytes that a micro-batch needs at most at one time. Training keeps what all units before the
  /// running one left for their backward; evaluation only what flows.
  index_t planned_bytes(batch_shape shape, bool training = true) const {
    auto const flowing = arena<memory>::template bytes_for<residual_scalar>(shape.tokens() * config_.width);
    index_t kept = flowing, peak = kept; // the gradient that flows back, or the hidden state alone
    for (auto const& u : units_) {
      auto const own = u->kept_bytes(shape);
      peak = (std::max)(peak, kept + own + u->scratch_bytes(shape));
      if (training) kept += own;
    }
    return peak;
  }

  /// The summed loss of one micro-batch; writes the gradient of its sum (times p.gradient_scale), or adds it
  /// where p.accumulate says so. `ready(i)` is called as soon as the gradients of unit i are final, from the
  /// last unit to the first. Throws size_error for a batch larger than planned, a token outside the
  /// vocabulary, or a target that is neither in it nor ignored; config_error without training.
  template <std::invocable<std::size_t> Ready>
  loss_sum forward_backward(Ex& ex, token_view tokens, token_view targets, pass p, Ready&& ready,
                            site where = site::here()) {
    clear_loss(ex);
    start_forward_backward(ex, tokens, targets, p, ready, where);
    return read_loss(ex);
  }
  loss_sum forward_backward(Ex& ex, token_view tokens, token_view targets, pass p = {},
                            site where = site::here()) {
    return forward_backward(
        ex, tokens, targets, p, [](std::size_t) {}, where);
  }

  /// The same in three steps, where the space works on while the host goes on, or where the second one is
  /// captured in a graph: `start_forward_backward` adds to the loss without waiting for it.
  void clear_loss(Ex& ex) {
    zero(ex, totals_.span()); // of exec/copy.hpp, or of the space's own header
  }
  template <std::invocable<std::size_t> Ready>
  void start_forward_backward(Ex& ex, token_view tokens, token_view targets, pass p, Ready&& ready,
                              site where = site::here()) {
    if (!training_)
      throw config_error("E-nn-017", where, "forward_backward of a model made with .training = false");
    p.training = true;
    arena_scope const scope(activations_);
    auto s = begin(tokens, targets, true, where);
    s.gradient = activations_.template take<residual_scalar, 2>({s.shape().tokens(), config_.width});
    for (std::size_t i = 0; i < units_.size(); ++i) {
      starts_[i] = activations_.mark();
      units_[i]->forward(ex, store_.lend(i), s, activations_, p);
    }
    for (auto i = units_.size(); i-- > 0;) {
      units_[i]->backward(ex, store_.lend(i), s, activations_, p);
      activations_.release(starts_[i]);
      ready(i);
    }
  }
  /// Waits for it. Throws what the space found out only now, such as a token outside the vocabulary.
  loss_sum read_loss(Ex& ex) {
    double totals[2];
    copy(ex, std::span<double>(totals), totals_.span());
    return {totals[0], totals[1]};
  }

  /// The summed loss of one micro-batch in nats, without dropout, smoothing or z-loss.
  loss_sum evaluate(Ex& ex, token_view tokens, token_view targets, site where = site::here()) {
    arena_scope const scope(activations_);
    clear_loss(ex);
    auto s = begin(tokens, targets, false, where);
    for (std::size_t i = 0; i < units_.size(); ++i)
      units_[i]->forward(ex, store_.lend(i), s, activations_, {.training = false});
    return read_loss(ex);
  }

private:
  void check_shape(batch_shape shape, site where) const {
    if (shape.batch < 0 || shape.sequence_length < 1 || shape.sequence_length > config_.sequence_length)
      throw size_error("E-nn-018", where, "a micro-batch of ", shape.batch, " samples of ",
                       shape.sequence_length, " tokens; the model takes 0 or more samples of 1 to ",
                       config_.sequence_length, " tokens (transformer_config::sequence_length)");
  }

  stream<Ex, T> begin(token_view tokens, token_view targets, bool training, site where) {
    stream<Ex, T> s{.tokens = tokens, .targets = targets, .totals = totals_.view()};
    check_shape(s.shape(), where);
    if (targets.extents() != tokens.extents())
      throw size_error("E-nn-019", where, "tokens are ", text_of(tokens.extents()), ", targets ",
                       text_of(targets.extents()), "; they need the same shape");
    if (auto const needed = planned_bytes(s.shape(), training); needed > activations_.capacity())
      throw size_error("E-nn-020", where, "a micro-batch of ", text_of(tokens.extents()), " tokens needs ",
                       needed, " bytes of activations, the model was made with ", activations_.capacity(),
                       "; make it with a larger batch_shape or feed smaller micro-batches");
    return s;
  }

  transformer_config config_;
  bool training_;
  unit_list<Ex, T, G> units_;
  parameter_store<Ex, T, G> store_;
  arena<memory> activations_;
  std::vector<typename arena<memory>::position> starts_;
  tensor<double, 1, memory> totals_; ///< {sum, count} of the loss.
};

} // namespace tessera::inline TESSERA_ABI::nn

#endif
