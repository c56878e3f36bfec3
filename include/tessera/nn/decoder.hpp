/// Generation: feeds tokens to a model and gives the logits of the next one. Keys and values of earlier
/// tokens are kept, so a token costs one row of every product, and reads every weight once.
///
///     decoder<exec::host, bf16, float> d(units, store, config, {.batch = 1});
///     auto logits = d.feed(ex, prompt);            // [batch, vocabulary], after the last token
///     while (...) logits = d.feed(ex, next_token);
#ifndef TESSERA_NN_DECODER_HPP
#define TESSERA_NN_DECODER_HPP

#include <tessera/nn/parameter_store.hpp>
#include <tessera/nn/transformer_config.hpp>

namespace tessera::inline TESSERA_ABI::nn {

struct decoder_options {
  index_t batch = 1;    ///< Samples side by side, all of one length.
  index_t capacity = 0; ///< Tokens that a sample may reach; 0 stands for the config's sequence length.
  index_t chunk = 128;  ///< Tokens of a sample that run at once: bounds the activation memory of a prompt.
  memory_meter* meter = nullptr;
};

/// Borrows the units and the store, which outlive it. Gives the same numbers as the full forward, to
/// rounding.
template <exec::space Ex, storage_scalar T, storage_scalar G>
class decoder {
public:
  using memory = typename Ex::memory;
  using token_view = view<std::int32_t const, 2, memory>;

  /// Throws size_error for options that do not fit the config.
  decoder(unit_list<Ex, T, G>& units, parameter_store<Ex, T, G>& store, transformer_config const& config,
          decoder_options options = {}, site where = site::here())
      : units_(units), store_(store), options_(options) {
    if (options_.capacity == 0) options_.capacity = config.sequence_length;
    if (options_.batch < 1 || options_.chunk < 1 || options_.capacity < 1 ||
        options_.capacity > config.sequence_length)
      throw size_error("E-nn-021", where, "decoder: batch ", options_.batch, ", chunk ", options_.chunk,
                       ", capacity ", options_.capacity,
                       "; need 1 or more of each, and a capacity of at most ", config.sequence_length,
                       " (transformer_config::sequence_length)");
    options_.chunk = (std::min)(options_.chunk, options_.capacity);
    index_t cached = 0;
    auto const shape = batch_shape{options_.batch, options_.chunk};
    auto bytes = index_t{0};
    for (auto const& u : units_) {
      cached += 2 * options_.batch * options_.capacity * u->cache_width();
      bytes = (std::max)(bytes, u->kept_bytes(shape) + u->scratch_bytes(shape));
    }
    bytes += units_.front()->kept_bytes(shape); // the hidden state that flows
    cache_ = tensor<T, 1, memory>({cached}, {options_.meter, memory_kind::activations}, where);
    logits_ = tensor<float, 2, memory>({options_.batch, config.vocabulary_size},
                                       {options_.meter, memory_kind::activations}, where);
    activations_ = arena<memory>(bytes, {options_.meter, memory_kind::activations}, where);
  }

  /// Tokens of a sample fed so far, and how many there can be.
  index_t length() const noexcept { return length_; }
  index_t capacity() const noexcept { return options_.capacity; }

  /// Forgets all tokens.
  void reset() noexcept { length_ = 0; }

  /// Appends tokens[batch, any number > 0]. The logits stay until the next call. Throws size_error where they
  /// do not fit; the decoder is then as it was.
  view<float const, 2, memory> feed(Ex& ex, token_view tokens, site where = site::here()) {
    if (tokens.extent(0) != options_.batch || tokens.extent(1) < 1)
      throw size_error("E-nn-022", where, "decoder: tokens are ", text_of(tokens.extents()), ", need [",
                       options_.batch, ", 1 or more]");
    if (tokens.extent(1) > options_.capacity - length_)
      throw size_error("E-nn-023", where, "decoder: ", tokens.extent(1), " tokens after ", length_,
                       " do not fit the capacity of ", options_.capacity,
                       "; reset it and feed the last tokens again, or stop");
    auto const before = length_;
    try {
      for (index_t begin = 0; begin < tokens.extent(1); begin += options_.chunk)
        run(ex, tokens.slice(1, begin, (std::min)(begin + options_.chunk, tokens.extent(1))));
    } catch (...) {
      length_ = before;
      throw;
    }
    return logits_.view();
  }

private:
  void run(Ex& ex, token_view tokens) {
    arena_scope const scope(activations_);
    stream<Ex, T> s{.tokens = tokens, .first_position = length_, .logits = logits_.view()};
    auto* next = cache_.data();
    for (std::size_t i = 0; i < units_.size(); ++i) {
      auto const width = units_[i]->cache_width();
      auto const sizes = extents<3>{options_.batch, options_.capacity, width};
      s.keys = view<T, 3, memory>(next, sizes);
      s.values = view<T, 3, memory>(next + s.keys.size(), sizes);
      next += 2 * s.keys.size();
      units_[i]->forward(ex, store_.lend(i), s, activations_, {.training = false});
    }
    length_ += tokens.extent(1);
  }

  unit_list<Ex, T, G>& units_;
  parameter_store<Ex, T, G>& store_;
  decoder_options options_;
  tensor<T, 1, memory> cache_; ///< Per unit its keys, then its values: [batch, capacity, cache_width()].
  tensor<float, 2, memory> logits_;
  arena<memory> activations_;
  index_t length_ = 0;
};

} // namespace tessera::inline TESSERA_ABI::nn

#endif
