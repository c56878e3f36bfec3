/// Trains a sentencepiece tokenizer on a text file, once: the model is kept, and used again as long as the
/// text and the options are the same.
///
///     auto const tokenizer =
///         data::prepare_sentencepiece("bible.txt", "run/tokenizer.model", {.vocabulary_size = 2048});
///
/// One process prepares; others load the model afterwards. Exists under TESSERA_WITH_SENTENCEPIECE,
/// TESSERA_WITH_JSON and TESSERA_WITH_XXHASH.
#ifndef TESSERA_DATA_PREPARE_SENTENCEPIECE_HPP
#define TESSERA_DATA_PREPARE_SENTENCEPIECE_HPP

#if defined(TESSERA_WITH_SENTENCEPIECE) && defined(TESSERA_WITH_JSON) && defined(TESSERA_WITH_XXHASH)

#include <string>

#include <tessera/data/detail/made_from.hpp>
#include <tessera/data/sentencepiece.hpp>

namespace tessera::inline TESSERA_ABI::data {

/// Makes, or finds again, the model file. Throws as train_sentencepiece does, and io_error if the text is
/// missing or empty, or the disk is full.
inline sentencepiece_tokenizer prepare_sentencepiece(std::string const& text_path,
                                                     std::string const& model_path,
                                                     sentencepiece_options options,
                                                     site where = site::here()) {
  io::mapped_file const text(text_path, where);
  auto made_from = detail::identity_of(text);
  made_from["vocabulary_size"] = options.vocabulary_size;
  made_from["training_bytes"] = options.training_bytes;
  if (!detail::is_current(model_path, made_from, where)) {
    train_sentencepiece(text.text(), options, where).save(model_path, where);
    detail::record(model_path, made_from, where);
  }
  return load_sentencepiece(model_path, where);
}

} // namespace tessera::inline TESSERA_ABI::data

#endif
#endif
