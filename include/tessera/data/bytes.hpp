/// The tokenizer without a vocabulary file: every byte of the text is a token, 0 to 255.
///
///     data::byte_tokenizer tokenizer;
///     tokenizer.decode(tokenizer.encode("In the beginning"));
#ifndef TESSERA_DATA_BYTES_HPP
#define TESSERA_DATA_BYTES_HPP

#include <tessera/data/tokenizer.hpp>

namespace tessera::inline TESSERA_ABI::data {

class byte_tokenizer {
public:
  constexpr index_t vocabulary_size() const noexcept { return 256; }
  constexpr std::string_view name() const noexcept { return "bytes"; }
  constexpr std::uint64_t fingerprint() const noexcept { return 256; }

  std::vector<std::int32_t> encode(std::string_view text) const {
    std::vector<std::int32_t> tokens(text.size());
    for (std::size_t n = 0; n < text.size(); ++n) tokens[n] = static_cast<unsigned char>(text[n]);
    return tokens;
  }

  std::string decode(std::span<std::int32_t const> tokens, site where = site::here()) const {
    std::string text(tokens.size(), '\0');
    for (std::size_t n = 0; n < tokens.size(); ++n) {
      if (tokens[n] < 0 || tokens[n] > 255)
        throw size_error("E-data-001", where, "token ", n, " is ", tokens[n], ", not a byte");
      text[n] = static_cast<char>(tokens[n]);
    }
    return text;
  }
};

} // namespace tessera::inline TESSERA_ABI::data

#endif
