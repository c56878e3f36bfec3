/// A tokenizer that learns its pieces from a text: byte-pair merges through sentencepiece
/// (github.com/google/sentencepiece; Sennrich, Haddow and Birch, "Neural machine translation of rare words
/// with subword units", 2016). Bytes that no piece covers are tokens of their own, so every text comes back
/// exactly, whatever bytes it holds.
///
///     auto const tokenizer = data::train_sentencepiece(text, {.vocabulary_size = 4096});
///     tokenizer.save("run/tokenizer.model");
///     auto const same = data::load_sentencepiece("run/tokenizer.model");
///     same.decode(same.encode("In the beginning"));
///
/// Training is single-threaded, silent and deterministic: the same text gives the same model, byte for byte.
/// Exists under TESSERA_WITH_SENTENCEPIECE; the one file that includes sentencepiece's headers. Link
/// sentencepiece and sentencepiece_train.
#ifndef TESSERA_DATA_SENTENCEPIECE_HPP
#define TESSERA_DATA_SENTENCEPIECE_HPP

#if defined(TESSERA_WITH_SENTENCEPIECE)

#include <memory>
#include <string>
#include <unordered_map>
#include <utility>

#include <sentencepiece_processor.h>
#include <sentencepiece_trainer.h>

#include <tessera/data/detail/text_pieces.hpp>
#include <tessera/data/tokenizer.hpp>
#include <tessera/io/atomic_file.hpp>
#include <tessera/io/mapped_file.hpp>
#include <tessera/layout/parameters.hpp>

namespace tessera::inline TESSERA_ABI::data {

class sentencepiece_tokenizer {
public:
  /// From a model's bytes; `source` is what messages call it. Throws io_error if they are no model, or a
  /// model that cannot give every text back.
  explicit sentencepiece_tokenizer(std::string model, std::string const& source = "the model",
                                   site where = site::here())
      : model_(std::move(model)), processor_(std::make_unique<::sentencepiece::SentencePieceProcessor>()) {
    auto const status = processor_->LoadFromSerializedProto(model_);
    if (!status.ok() || processor_->GetPieceSize() < 1)
      throw io_error("E-data-012", where, source, " is not a sentencepiece model: ", status.ToString());
    pieces_.reserve(static_cast<std::size_t>(processor_->GetPieceSize()));
    for (int id = 0; id < processor_->GetPieceSize(); ++id) pieces_.push_back(text_of_piece(id));
    for (int byte = 0; byte < 256; ++byte) {
      byte_tokens_[byte] = processor_->PieceToId(detail::byte_piece(byte));
      if (!processor_->IsByte(byte_tokens_[byte]))
        throw io_error("E-data-012", where, source,
                       " has no tokens for single bytes; train it with byte_fallback");
    }
    // Spaces at the ends and doubled, and characters that Unicode's normal forms would replace.
    std::string_view const probe = "  two  spaces e\u0301 \ufb01 \u00bd \uff21  ";
    if (decode(encode(probe)) != probe)
      throw io_error("E-data-012", where, source,
                     " changes text (spaces or Unicode forms); train it with normalization identity, "
                     "add_dummy_prefix and remove_extra_whitespaces off");
  }

  index_t vocabulary_size() const noexcept { return static_cast<index_t>(pieces_.size()); }
  std::string_view name() const noexcept { return "sentencepiece"; }
  std::uint64_t fingerprint() const noexcept { return layout::stream_of(model_); }
  /// The serialized model.
  std::string const& model() const noexcept { return model_; }

  /// Writes the model to a file: complete, or not at all.
  void save(std::string const& path, site where = site::here()) const { io::write_file(path, model_, where); }

  std::vector<std::int32_t> encode(std::string_view text, site where = site::here()) const {
    std::vector<std::int32_t> tokens;
    tokens.reserve(text.size() / 3);
    std::vector<int> found;
    while (!text.empty()) {
      // Sentencepiece would normalise what is not UTF-8 or looks like its own mark for a space.
      auto const length = detail::plain_prefix(text);
      if (length == 0) {
        tokens.push_back(byte_tokens_[static_cast<unsigned char>(text.front())]);
        text.remove_prefix(1);
        continue;
      }
      auto const status = processor_->Encode({text.data(), length}, &found);
      if (!status.ok())
        throw library_error("E-data-013", where, "sentencepiece could not encode: ", status.ToString());
      tokens.insert(tokens.end(), found.begin(), found.end());
      text.remove_prefix(length);
    }
    return tokens;
  }

  std::string decode(std::span<std::int32_t const> tokens, site where = site::here()) const {
    std::string text;
    for (auto token : tokens) {
      if (token < 0 || token >= vocabulary_size())
        throw size_error("E-data-001", where, "token ", token, " is outside the vocabulary of ",
                         vocabulary_size());
      text += pieces_[static_cast<std::size_t>(token)];
    }
    return text;
  }

private:
  std::string text_of_piece(int id) const {
    if (processor_->IsControl(id) || processor_->IsUnknown(id)) return {};
    auto const& piece = processor_->IdToPiece(id);
    return processor_->IsByte(id) ? detail::byte_of_piece(piece) : detail::with_spaces(piece);
  }

  std::string model_;
  std::unique_ptr<::sentencepiece::SentencePieceProcessor> processor_;
  std::vector<std::string> pieces_; ///< The text of every token.
  std::int32_t byte_tokens_[256] = {};
};

struct sentencepiece_options {
  index_t vocabulary_size = 4096;
  /// Longer texts are trained on every n-th line, so that about this many bytes are read.
  index_t training_bytes = index_t{16} << 20;
};

namespace detail {

/// Hands a text to the trainer line by line, long lines in pieces, nothing empty.
class line_iterator final : public ::sentencepiece::SentenceIterator {
public:
  line_iterator(std::string_view text, index_t training_bytes)
      : rest_(text), every_((static_cast<index_t>(text.size()) + training_bytes - 1) / training_bytes) {
    advance();
  }
  bool done() const override { return done_; }
  void Next() override { advance(); }
  std::string const& value() const override { return line_; }
  ::sentencepiece::util::Status status() const override { return {}; }

private:
  void advance() {
    for (done_ = true; done_ && !rest_.empty(); ++seen_) {
      line_ = take_line(rest_);
      done_ = line_.empty() || seen_ % every_ != 0;
    }
  }

  std::string_view rest_;
  index_t every_;
  index_t seen_ = 0;
  std::string line_;
  bool done_ = false;
};

} // namespace detail

/// Learns a vocabulary of exactly the given size from a text. Throws config_error if the size is impossible
/// for this text, size_error if the text is empty.
inline sentencepiece_tokenizer train_sentencepiece(std::string_view text, sentencepiece_options options,
                                                   site where = site::here()) {
  if (options.vocabulary_size < 258 || options.vocabulary_size > (1 << 24) || options.training_bytes < 1)
    throw config_error("E-data-014", where, "a vocabulary of ", options.vocabulary_size,
                       " pieces: 256 single bytes, the unknown piece and at least one more are needed");
  detail::line_iterator lines(text, options.training_bytes);
  if (lines.done()) throw size_error("E-data-009", where, "there is no text to learn a vocabulary from");
  std::unordered_map<std::string, std::string> const settings{
      {"model_type", "bpe"},
      {"vocab_size", std::to_string(options.vocabulary_size)},
      {"byte_fallback", "true"},
      {"character_coverage", "0.9995"},
      {"normalization_rule_name", "identity"},
      {"add_dummy_prefix", "false"},
      {"remove_extra_whitespaces", "false"},
      {"unk_id", "0"},
      {"bos_id", "-1"},
      {"eos_id", "-1"},
      {"pad_id", "-1"},
      {"num_threads", "1"},
      {"max_sentence_length", "65536"},
      {"minloglevel", "3"},
  };
  std::string model;
  auto const status = ::sentencepiece::SentencePieceTrainer::Train(settings, &lines, &model);
  if (!status.ok())
    throw config_error(
        "E-data-014", where, "no vocabulary of ", options.vocabulary_size, " pieces can be learnt from ",
        text.size(),
        " bytes of text; ask for another number, or give more text (sentencepiece: ", status.ToString(), ")");
  return sentencepiece_tokenizer(std::move(model), "the model just trained", where);
}

/// Reads a model file. Throws io_error.
inline sentencepiece_tokenizer load_sentencepiece(std::string const& path, site where = site::here()) {
  return sentencepiece_tokenizer(std::string(io::mapped_file(path, where).text()), path, where);
}

} // namespace tessera::inline TESSERA_ABI::data

#endif
#endif
