#include <doctest/doctest.h>

#include <tessera/data/tokenizer.hpp>

#include "data/conformance.hpp"

using namespace tessera;

namespace {

/// Two tokens a byte: a tokenizer of somebody else's.
struct nibbles {
  index_t vocabulary_size() const { return 16; }
  char const* name() const { return "nibbles"; }
  std::uint64_t fingerprint() const { return 16; }
  std::vector<std::int32_t> encode(std::string_view text) const {
    std::vector<std::int32_t> tokens;
    for (unsigned char byte : text) {
      tokens.push_back(byte / 16);
      tokens.push_back(byte % 16);
    }
    return tokens;
  }
  std::string decode(std::span<std::int32_t const> tokens) const {
    for (auto token : tokens)
      if (token < 0 || token >= 16) throw size_error("E-data-001", site::here(), "token ", token);
    std::string text;
    for (std::size_t n = 0; n + 1 < tokens.size(); n += 2)
      text += static_cast<char>(tokens[n] * 16 + tokens[n + 1]);
    return text;
  }
};

struct without_decode {
  index_t vocabulary_size() const { return 16; }
  char const* name() const { return "half"; }
  std::uint64_t fingerprint() const { return 1; }
  std::vector<std::int32_t> encode(std::string_view) const { return {}; }
};

} // namespace

TEST_CASE("anything with the five members is a tokenizer") {
  static_assert(data::tokenizer<nibbles>);
  static_assert(!data::tokenizer<without_decode>);
  static_assert(!data::tokenizer<int>);
  test::check_tokenizer(nibbles{});
}
