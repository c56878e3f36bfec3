/// Continues a list of tokens with a trained model.
///
///     auto more = train::generate(ex, decoder, prompt, 200, {.temperature = 0.8}, philox(seed),
///                                 [&](std::int32_t token) { print(token); });
///
/// Cost: one pass over the weights a token. When the model's context is full, its second half is fed again
/// and the rest forgotten.
#ifndef TESSERA_TRAIN_GENERATE_HPP
#define TESSERA_TRAIN_GENERATE_HPP

#include <tessera/exec/copy.hpp>
#include <tessera/nn/decoder.hpp>
#include <tessera/train/sample.hpp>

namespace tessera::inline TESSERA_ABI::train {

/// The `count` tokens that follow `prompt`; `seen` is called with each as soon as it is chosen. Only the end
/// of a prompt that is longer than the context is used. Throws size_error for an empty prompt.
template <exec::space Ex, storage_scalar T, storage_scalar G, std::invocable<std::int32_t> Seen>
std::vector<std::int32_t>
generate(Ex& ex, nn::decoder<Ex, T, G>& decoder, std::vector<std::int32_t> const& prompt, index_t count,
         sampling const& how, philox const& random, Seen&& seen, site where = site::here()) {
  if (prompt.empty())
    throw size_error("E-train-033", where, "there is no prompt to continue; give one token or more");
  auto text = prompt;
  exec::staged<std::int32_t, 2, Ex> tokens(ex, {1, decoder.capacity()}, {}, where);
  std::vector<float> logits;
  auto const feed_last = [&](index_t count) {
    std::copy(text.end() - static_cast<std::ptrdiff_t>(count), text.end(), tokens.host().data());
    auto const found = decoder.feed(ex, tokens.upload(ex).slice(1, 0, count), where)[0].span();
    logits.resize(found.size());
    copy(ex, std::span<float>(logits), found, where);
  };
  decoder.reset();
  auto waiting = (std::min)(static_cast<index_t>(text.size()), decoder.capacity()); // not yet fed
  for (index_t n = 0; n < count; ++n) {
    if (decoder.length() + waiting > decoder.capacity()) {
      decoder.reset();
      waiting = (decoder.capacity() + 1) / 2;
    }
    feed_last(waiting);
    waiting = 1;
    text.push_back(sample_token(logits, how, random, static_cast<std::uint64_t>(n), where));
    seen(text.back());
  }
  return {text.begin() + static_cast<std::ptrdiff_t>(prompt.size()), text.end()};
}

} // namespace tessera::inline TESSERA_ABI::train

#endif
