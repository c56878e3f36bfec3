/// The tokenizer of a run, chosen by name when the program runs: bytes, or sentencepiece with the model that
/// was learnt from the text. With tokenizer "tokens" there is no text, and asking for some is an error.
///
///     auto const tokenizer = text_tokenizer("sentencepiece", model_bytes);
///     tokenizer.decode(tokenizer.encode("In the beginning"));
#ifndef TESSERA_TRAIN_TEXT_TOKENIZER_HPP
#define TESSERA_TRAIN_TEXT_TOKENIZER_HPP

#if defined(TESSERA_WITH_SENTENCEPIECE)

#include <variant>

#include <tessera/data/bytes.hpp>
#include <tessera/data/sentencepiece.hpp>

namespace tessera::inline TESSERA_ABI::train {

class text_tokenizer {
  template <class F>
  auto with_text(site where, F&& f) const {
    if (auto const* bytes = std::get_if<data::byte_tokenizer>(&held_)) return f(*bytes);
    if (auto const* learnt = std::get_if<data::sentencepiece_tokenizer>(&held_)) return f(*learnt);
    throw config_error("E-train-046", where,
                       "this run learns from a token file; it has no text to read or write");
  }

public:
  text_tokenizer() = default;
  /// `model` is sentencepiece's; the others have none. Throws config_error for a name that is no tokenizer,
  /// io_error for bytes that are no model.
  text_tokenizer(std::string_view name, std::string model, site where = site::here()) {
    if (name == "bytes")
      held_ = data::byte_tokenizer();
    else if (name == "sentencepiece")
      held_.emplace<data::sentencepiece_tokenizer>(std::move(model), "the run's tokenizer.model", where);
    else if (name != "tokens")
      throw config_error("E-train-045", where, "there is no tokenizer '", name, "'");
  }
  explicit text_tokenizer(data::sentencepiece_tokenizer learnt) : held_(std::move(learnt)) {}

  /// False for "tokens": there is no text.
  bool has_text() const noexcept { return held_.index() != 0; }

  std::vector<std::int32_t> encode(std::string_view text, site where = site::here()) const {
    return with_text(where, [&](auto const& tokenizer) { return tokenizer.encode(text); });
  }
  std::string decode(std::span<std::int32_t const> tokens, site where = site::here()) const {
    return with_text(where, [&](auto const& tokenizer) { return tokenizer.decode(tokens); });
  }
  index_t vocabulary_size(site where = site::here()) const {
    return with_text(where, [](auto const& tokenizer) { return tokenizer.vocabulary_size(); });
  }
  /// The bytes that, with the name, make this tokenizer again.
  std::string model() const {
    auto const* const learnt = std::get_if<data::sentencepiece_tokenizer>(&held_);
    return learnt == nullptr ? std::string{} : learnt->model();
  }
  /// How many bytes of text each token stands for.
  std::vector<index_t> bytes_of_tokens(site where = site::here()) const {
    std::vector<index_t> bytes(static_cast<std::size_t>(vocabulary_size(where)));
    for (std::size_t token = 0; token < bytes.size(); ++token) {
      auto const one = static_cast<std::int32_t>(token);
      bytes[token] = static_cast<index_t>(decode(std::span(&one, 1), where).size());
    }
    return bytes;
  }

private:
  std::variant<std::monostate, data::byte_tokenizer, data::sentencepiece_tokenizer> held_;
};

} // namespace tessera::inline TESSERA_ABI::train

#endif
#endif
