/// What a run learns from, prepared once and opened by every rank: the text as a file of tokens, cut into
/// training and validation samples, with the tokenizer and the entropies of the simplest models.
///
///     auto const text = open_corpus(comm, settings);
///     text.training.fill(order.sample_at(position), tokens, targets);
///     text.statistics.bigram_entropy;             // nats per byte, to compare the loss with
///
/// Rank 0 tokenizes into `RUN/data/`, where a resumed run finds the tokens again.
/// Exists under TESSERA_WITH_JSON, TESSERA_WITH_XXHASH and TESSERA_WITH_SENTENCEPIECE.
#ifndef TESSERA_TRAIN_CORPUS_HPP
#define TESSERA_TRAIN_CORPUS_HPP

#if defined(TESSERA_WITH_JSON) && defined(TESSERA_WITH_XXHASH) && defined(TESSERA_WITH_SENTENCEPIECE)

#include <optional>

#include <tessera/data/fingerprint.hpp>
#include <tessera/data/prepare.hpp>
#include <tessera/data/prepare_sentencepiece.hpp>
#include <tessera/data/text_statistics.hpp>
#include <tessera/data/token_dataset.hpp>
#include <tessera/train/settings_json.hpp>
#include <tessera/train/text_tokenizer.hpp>
#include <tessera/train/together.hpp>

namespace tessera::inline TESSERA_ABI::train {

namespace detail {

/// What rank 0 tells the others about the prepared files.
struct prepared_corpus {
  std::string tokens;               ///< Path of the token file.
  std::string model;                ///< Path of the tokenizer's model; empty: none.
  index_t vocabulary = 0;           ///< Of the model that is to be trained.
  data::text_statistics statistics; ///< bytes 0: a token file, whose text is not known.
};

inline prepared_corpus prepare_corpus(settings const& s, site where) {
  if (s.tokenizer == "tokens") return {s.data, {}, s.vocabulary, {}};
  prepared_corpus prepared{s.run + "/data/tokens.bin", {}, 256, {}};
  auto const text = io::mapped_file(s.data, where); // before a folder is made for a text that is not there
  io::make_folders(s.run + "/data", where);
  io::remove_leftovers(s.run + "/data", where); // a killed run's
  if (s.tokenizer == "bytes") {
    (void)data::prepare_text(s.data, prepared.tokens, data::byte_tokenizer(), where);
  } else {
    prepared.model = s.run + "/data/tokenizer.model";
    prepared.vocabulary = s.vocabulary == 0 ? 2048 : s.vocabulary;
    auto const tokenizer =
        data::prepare_sentencepiece(s.data, prepared.model, {.vocabulary_size = prepared.vocabulary}, where);
    (void)data::prepare_text(s.data, prepared.tokens, tokenizer, where);
  }
  prepared.statistics = data::text_statistics_of(text.text());
  return prepared;
}

} // namespace detail

struct corpus {
  data::token_file file;
  data::token_dataset training;
  data::token_dataset validation;
  text_tokenizer tokenizer;
  index_t vocabulary = 0;
  data::text_statistics statistics; ///< Of the whole text; bytes 0 where there is none.
  /// Bytes of text for each token to be predicted; 0 where there is no text.
  double training_bytes_per_token = 0;
  double validation_bytes_per_token = 0;
  /// Of the tokens, in their order.
  std::string fingerprint;
};

namespace detail {

/// Over the tokens that are predicted: all but the first.
inline double bytes_per_token(data::token_dataset const& part, std::vector<index_t> const& bytes_of_tokens) {
  auto const predicted = part.tokens().slice(1, part.tokens().size() - 1);
  index_t sum = 0;
  for (index_t n = 0; n < predicted.size(); ++n) sum += bytes_of_tokens[predicted[n]];
  return static_cast<double>(sum) / static_cast<double>(predicted.size());
}

inline corpus open_prepared(prepared_corpus const& prepared, settings const& s, site where) {
  data::token_file file(prepared.tokens, where);
  auto const all = data::token_dataset(
      file.tokens(), {.sequence_length = s.sequence_length, .vocabulary_size = prepared.vocabulary}, where);
  all.check(where);
  auto const parts = all.split(s.validation_share, where);
  auto model =
      prepared.model.empty() ? std::string{} : std::string(io::mapped_file(prepared.model, where).text());
  corpus opened{std::move(file),
                parts.training,
                parts.validation,
                text_tokenizer(s.tokenizer, std::move(model), where),
                prepared.vocabulary,
                prepared.statistics,
                0,
                0,
                io::hexadecimal(data::fingerprint_of(all.tokens()))};
  if (opened.tokenizer.has_text()) {
    auto const bytes = opened.tokenizer.bytes_of_tokens(where);
    opened.training_bytes_per_token = bytes_per_token(opened.training, bytes);
    opened.validation_bytes_per_token = bytes_per_token(opened.validation, bytes);
  }
  return opened;
}

} // namespace detail

/// Called by every rank of `comm`. Throws on all of them if the text is missing, empty or too short, or holds
/// a token outside the vocabulary, or is another one on another rank.
template <comm::communicator Comm>
corpus open_corpus(Comm& comm, settings const& s, site where = site::here()) {
  detail::prepared_corpus prepared;
  on_root(
      comm, [&] { prepared = detail::prepare_corpus(s, where); }, where);
  prepared.tokens = shared_text(comm, prepared.tokens);
  prepared.model = shared_text(comm, prepared.model);
  auto& [bytes, unigram, bigram] = prepared.statistics;
  comm.broadcast(std::span(&prepared.vocabulary, 1), 0);
  comm.broadcast(std::span(&bytes, 1), 0);
  comm.broadcast(std::span(&unigram, 1), 0);
  comm.broadcast(std::span(&bigram, 1), 0);
  std::optional<corpus> opened;
  together(
      comm, [&] { opened.emplace(detail::open_prepared(prepared, s, where)); }, where);
  auto const of_root = shared_text(comm, opened->fingerprint);
  together(
      comm,
      [&] {
        if (opened->fingerprint != of_root)
          throw config_error("E-train-042", where, "rank ", comm.rank(), " finds other tokens in ",
                             prepared.tokens, " than rank 0: the path must lead all ranks to the same file");
      },
      where);
  return std::move(*opened);
}

} // namespace tessera::inline TESSERA_ABI::train

#endif
#endif
