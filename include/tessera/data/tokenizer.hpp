/// What turns text into tokens and back. Models: data/bytes.hpp, data/sentencepiece.hpp.
#ifndef TESSERA_DATA_TOKENIZER_HPP
#define TESSERA_DATA_TOKENIZER_HPP

#include <concepts>
#include <cstdint>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include <tessera/core/extents.hpp>

namespace tessera::inline TESSERA_ABI::data {

/// Semantics (tests/data/tokenizer.cpp): encode gives tokens in [0, vocabulary_size()); decode(encode(text))
/// == text for every text, bytes that are no UTF-8 included; decode of two lists joined is the two texts
/// joined; equal fingerprints mean equal encodings. decode throws size_error for a token out of range.
template <class T>
concept tokenizer = requires(T const& t, std::string_view text, std::span<std::int32_t const> tokens) {
  { t.vocabulary_size() } -> std::same_as<index_t>;
  { t.encode(text) } -> std::same_as<std::vector<std::int32_t>>;
  { t.decode(tokens) } -> std::same_as<std::string>;
  { t.name() } -> std::convertible_to<std::string_view>;
  { t.fingerprint() } -> std::same_as<std::uint64_t>;
};

} // namespace tessera::inline TESSERA_ABI::data

#endif
