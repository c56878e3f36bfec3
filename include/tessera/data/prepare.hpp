/// From a text file to tokens, once: the tokens are kept in a shard beside the run and used again as long as
/// the text and the tokenizer are the same.
///
///     auto const prepared = data::prepare_text("bible.txt", "run/tokens.bin", data::byte_tokenizer{});
///     prepared.tokens.tokens();       // a token_view
///     prepared.reused;                // false the first time
///
/// One process prepares; others open the shard afterwards. Exists under TESSERA_WITH_JSON and
/// TESSERA_WITH_XXHASH. Cost: the text read once for its checksum, and, if it must, once more for its tokens.
#ifndef TESSERA_DATA_PREPARE_HPP
#define TESSERA_DATA_PREPARE_HPP

#include <string>
#include <vector>

#include <tessera/data/token_file.hpp>
#include <tessera/data/tokenizer.hpp>

#if defined(TESSERA_WITH_JSON) && defined(TESSERA_WITH_XXHASH)
#include <tessera/data/detail/made_from.hpp>
#endif

namespace tessera::inline TESSERA_ABI::data {

namespace detail {

/// Hands the text over in stretches that end with a line, so that memory stays bounded.
template <tokenizer Tokenizer, std::invocable<std::vector<std::int32_t> const&> Take>
void encode_in_stretches(std::string_view text, Tokenizer const& tokenizer, Take take) {
  constexpr std::size_t at_least = std::size_t{8} << 20;
  while (!text.empty()) {
    auto const newline = text.size() > at_least ? text.find('\n', at_least) : std::string_view::npos;
    auto const length = newline == std::string_view::npos ? text.size() : newline + 1;
    take(tokenizer.encode(text.substr(0, length)));
    text.remove_prefix(length);
  }
}

} // namespace detail

/// The tokens of a text file, in memory. Throws io_error if it is missing or empty.
template <tokenizer Tokenizer>
std::vector<std::int32_t> tokens_of_file(std::string const& path, Tokenizer const& tokenizer,
                                         site where = site::here()) {
  io::mapped_file const text(path, where);
  std::vector<std::int32_t> tokens;
  detail::encode_in_stretches(text.text(), tokenizer, [&](std::vector<std::int32_t> const& more) {
    tokens.insert(tokens.end(), more.begin(), more.end());
  });
  return tokens;
}

#if defined(TESSERA_WITH_JSON) && defined(TESSERA_WITH_XXHASH)

struct prepared_text {
  token_file tokens;
  index_t text_bytes = 0;
  bool reused = false; ///< The shard was there already, whole and of this text and tokenizer.
};

/// Makes, or finds again, the shard `cache` of a text file; `cache`.json says what it was made from. Throws
/// io_error if the text is missing or empty, or the disk is full.
template <tokenizer Tokenizer>
prepared_text prepare_text(std::string const& text_path, std::string const& cache, Tokenizer const& tokenizer,
                           site where = site::here()) {
  io::mapped_file const text(text_path, where);
  auto made_from = detail::identity_of(text);
  made_from["tokenizer"] = std::string(tokenizer.name());
  made_from["tokenizer_fingerprint"] = io::hexadecimal(tokenizer.fingerprint());
  auto const reused = detail::is_current(cache, made_from, where);
  if (!reused) {
    token_writer writer(cache, tokenizer.vocabulary_size() <= 65536 ? token_width::two : token_width::four,
                        where);
    detail::encode_in_stretches(text.text(), tokenizer, [&](std::vector<std::int32_t> const& tokens) {
      writer.append(tokens, where);
    });
    writer.commit(where);
    detail::record(cache, made_from, where);
  }
  return {token_file(cache, where), text.size(), reused};
}

#endif

} // namespace tessera::inline TESSERA_ABI::data

#endif
