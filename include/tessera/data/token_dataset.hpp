/// A stretch of tokens cut into samples of one sequence each: sample s is the tokens [s L, s L + L), its
/// targets are the same stretch one token later. Samples do not overlap, except that a sample's last target
/// is the first token of the next; a rest shorter than a sample is left out.
///
///     data::token_dataset all(file.tokens(), {.sequence_length = 256, .vocabulary_size = 256});
///     auto const [training, validation] = all.split(0.1);
///     training.fill(order.sample_at(position), tokens, targets);
///
/// Borrows the tokens. Cost of `fill`: L + 1 tokens copied, each compared with the vocabulary's size.
#ifndef TESSERA_DATA_TOKEN_DATASET_HPP
#define TESSERA_DATA_TOKEN_DATASET_HPP

#include <cmath>

#include <tessera/data/token_view.hpp>

namespace tessera::inline TESSERA_ABI::data {

struct token_dataset_options {
  index_t sequence_length = 0;
  index_t vocabulary_size = 0;
};

class token_dataset {
public:
  /// Throws size_error if the tokens are fewer than one sequence and its last target.
  token_dataset(token_view tokens, token_dataset_options options, site where = site::here())
      : tokens_(tokens), options_(options) {
    if (options.sequence_length < 1 || options.vocabulary_size < 1)
      throw config_error("E-data-008", where, "a dataset of sequences of ", options.sequence_length,
                         " tokens out of a vocabulary of ", options.vocabulary_size, " is impossible");
    if (tokens.size() == 0) throw size_error("E-data-009", where, "the data holds no tokens");
    if (tokens.size() <= options.sequence_length)
      throw size_error("E-data-009", where, "the data holds ", tokens.size(), " tokens; one sequence of ",
                       options.sequence_length, " and its last target take ", options.sequence_length + 1,
                       ": give more text or a shorter sequence");
    samples_ = (tokens.size() - 1) / options.sequence_length;
  }

  /// Samples.
  index_t size() const noexcept { return samples_; }
  index_t sequence_length() const noexcept { return options_.sequence_length; }
  index_t vocabulary_size() const noexcept { return options_.vocabulary_size; }
  /// The tokens that samples are cut from (the split's own stretch and its last target).
  token_view tokens() const noexcept { return tokens_; }

  /// Copies one sample. Throws size_error for a sample that is not there, spans of another length, or a token
  /// outside the vocabulary (naming its place).
  void fill(index_t sample, std::span<std::int32_t> tokens, std::span<std::int32_t> targets,
            site where = site::here()) const {
    auto const length = options_.sequence_length;
    if (sample < 0 || sample >= samples_)
      throw size_error("E-data-010", where, "sample ", sample, " of ", samples_, " was asked for");
    if (static_cast<index_t>(tokens.size()) != length || static_cast<index_t>(targets.size()) != length)
      throw size_error("E-data-010", where, "a sample has ", length,
                       " tokens and targets, there is room for ", tokens.size(), " and ", targets.size());
    tokens_.copy(sample * length, tokens, options_.vocabulary_size, where);
    tokens_.copy(sample * length + 1, targets, options_.vocabulary_size, where);
  }

  /// Looks at all tokens before training begins. Throws size_error for one outside the vocabulary.
  void check(site where = site::here()) const { tokens_.check(options_.vocabulary_size, where); }

  /// Samples [first, first + count) alone; count >= 1.
  token_dataset subset(index_t first, index_t count, site where = site::here()) const {
    if (first < 0 || count < 1 || first > samples_ - count)
      throw size_error("E-data-010", where, "samples ", first, " to ", first + count, " of ", samples_,
                       " were asked for");
    auto const length = options_.sequence_length;
    return {tokens_.slice(first * length, count * length + 1, where), options_, where};
  }

  struct parts;
  /// The first samples for training, the last `validation_fraction` (rounded, at least one) for validation.
  /// Throws config_error for a fraction outside (0, 1), size_error if one part would be empty.
  parts split(double validation_fraction, site where = site::here()) const;

private:
  token_view tokens_;
  token_dataset_options options_;
  index_t samples_ = 0;
};

struct token_dataset::parts {
  token_dataset training;
  token_dataset validation;
};

inline token_dataset::parts token_dataset::split(double validation_fraction, site where) const {
  if (!(validation_fraction > 0 && validation_fraction < 1))
    throw config_error("E-data-011", where, "the share of validation is ", validation_fraction,
                       ", it must lie between 0 and 1");
  if (samples_ < 2)
    throw size_error("E-data-009", where, "the data holds one sequence of ", options_.sequence_length,
                     " tokens; training and validation need one each: give more text or a shorter sequence");
  auto validation = static_cast<index_t>(std::llround(static_cast<double>(samples_) * validation_fraction));
  if (validation < 1) validation = 1;
  if (validation > samples_ - 1) validation = samples_ - 1;
  auto const training = samples_ - validation;
  return {subset(0, training, where), subset(training, validation, where)};
}

} // namespace tessera::inline TESSERA_ABI::data

#endif
