#include <doctest/doctest.h>

#include <tessera/data/bytes.hpp>

#include "data/conformance.hpp"

using namespace tessera;

TEST_CASE("the byte tokenizer gives every text back") {
  static_assert(data::tokenizer<data::byte_tokenizer>);
  test::check_tokenizer(data::byte_tokenizer{});
}

TEST_CASE("a byte's token is its value") {
  data::byte_tokenizer const tokenizer;
  CHECK(tokenizer.vocabulary_size() == 256);
  CHECK(tokenizer.encode("Az\xff") == std::vector<std::int32_t>{65, 122, 255});
}
