/// The concept data::tokenizer, checked line by line on texts that are hard to give back.
#ifndef TESSERA_TESTS_DATA_CONFORMANCE_HPP
#define TESSERA_TESTS_DATA_CONFORMANCE_HPP

#include <doctest/doctest.h>

#include <tessera/data/tokenizer.hpp>

#include "support/thrown.hpp"

namespace test {

inline std::vector<std::string> hard_texts() {
  std::string all_bytes;
  for (int byte = 0; byte < 256; ++byte) all_bytes += static_cast<char>(byte);
  return {"",
          "a",
          " ",
          "   two  spaces   ",
          "\n",
          "\n\n a line \r\n\tand a tab\n",
          std::string("zero\0byte\0", 10),
          "caf\u00e9 na\u00efve \u4e2d\u6587 \U0001F600",
          "\u2581 the mark for a space \u2581\u2581",
          "e\u0301 \ufb01 \u00bd \uff21 keep their form",
          "<unk> <s> </s> <0x41>",
          "cut \xE2\x96",
          "\xE2\x96\x81\xE2\x96 \xC0\x80 \xED\xA0\x80 \xF4\x90\x80\x80 \xFF\xFE",
          all_bytes,
          std::string(5000, 'x'),
          "\uFEFF byte-order mark \uFFFD \uFFFE"};
}

template <tessera::data::tokenizer Tokenizer>
void check_tokenizer(Tokenizer const& tokenizer) {
  auto const encode = [&](std::string const& text) {
    auto const tokens = tokenizer.encode(text);
    for (auto token : tokens) {
      REQUIRE(token >= 0);
      REQUIRE(token < tokenizer.vocabulary_size());
    }
    return tokens;
  };
  std::string joined_text;
  std::vector<std::int32_t> joined;
  for (auto const& text : hard_texts()) {
    CAPTURE(text);
    auto const tokens = encode(text);
    CHECK(tokenizer.decode(tokens) == text);
    joined_text += text;
    joined.insert(joined.end(), tokens.begin(), tokens.end());
  }
  CHECK(tokenizer.decode(joined) == joined_text);
  CHECK(tokenizer.decode(encode(joined_text)) == joined_text);
  for (auto beyond : {std::int32_t{-1}, static_cast<std::int32_t>(tokenizer.vocabulary_size())}) {
    std::vector<std::int32_t> const tokens{0, beyond};
    auto const error = error_of<tessera::size_error>([&] { tokenizer.decode(tokens); });
    CHECK(error.id == "E-data-001");
    CHECK(error.says(std::to_string(beyond)));
  }
}

} // namespace test

#endif
