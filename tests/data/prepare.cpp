// requires: json xxhash
#include <doctest/doctest.h>

#include <tessera/data/bytes.hpp>
#include <tessera/data/prepare.hpp>

#include "support/temporary_folder.hpp"
#include "support/thrown.hpp"

using namespace tessera;

namespace {

/// Bytes moved by a constant: another tokenizer of the same size.
struct shifted_bytes {
  std::int32_t shift = 0;
  index_t vocabulary_size() const { return 256 + shift; }
  char const* name() const { return "shifted"; }
  std::uint64_t fingerprint() const { return static_cast<std::uint64_t>(shift); }
  std::vector<std::int32_t> encode(std::string_view text) const {
    std::vector<std::int32_t> tokens;
    for (unsigned char byte : text) tokens.push_back(byte + shift);
    return tokens;
  }
  std::string decode(std::span<std::int32_t const> tokens) const {
    std::string text;
    for (auto token : tokens) text += static_cast<char>(token - shift);
    return text;
  }
};

std::vector<std::int32_t> all_of(data::token_file const& file) {
  std::vector<std::int32_t> tokens(static_cast<std::size_t>(file.size()));
  file.tokens().copy(0, tokens, 1 << 30);
  return tokens;
}

} // namespace

TEST_CASE("a text is turned into tokens once and found again") {
  test::temporary_folder const folder;
  test::put(folder / "text", "some text\n");
  auto const first = data::prepare_text(folder / "text", folder / "tokens.bin", data::byte_tokenizer{});
  CHECK_FALSE(first.reused);
  CHECK(first.text_bytes == 10);
  CHECK(data::byte_tokenizer{}.decode(all_of(first.tokens)) == "some text\n");
  auto const second = data::prepare_text(folder / "text", folder / "tokens.bin", data::byte_tokenizer{});
  CHECK(second.reused);
  CHECK(all_of(second.tokens) == all_of(first.tokens));
  CHECK(io::names_in(folder.path()) == std::vector<std::string>{"text", "tokens.bin", "tokens.bin.json"});
}

TEST_CASE("another text, another tokenizer, or a damaged shard or record is not used again") {
  test::temporary_folder const folder;
  auto const path = folder / "tokens.bin";
  auto const prepare = [&](std::int32_t shift) {
    return data::prepare_text(folder / "text", path, shifted_bytes{shift});
  };
  test::put(folder / "text", "some text");
  prepare(0);
  CHECK(prepare(0).reused);
  test::put(folder / "text", "some tExt"); // the same length
  CHECK_FALSE(prepare(0).reused);
  CHECK(shifted_bytes{0}.decode(all_of(prepare(0).tokens)) == "some tExt");
  CHECK_FALSE(prepare(1).reused);
  CHECK(all_of(prepare(1).tokens)[0] == 's' + 1);
  CHECK(prepare(1).reused);

  auto shard = test::contents_of(path);
  shard.back() = static_cast<char>(shard.back() ^ 1);
  test::put(path, shard);
  CHECK_FALSE(prepare(1).reused);
  test::put(path, shard.substr(0, 1000));
  CHECK_FALSE(prepare(1).reused);
  test::put(path + ".json", "{");
  CHECK_FALSE(prepare(1).reused);
  io::remove_all(path + ".json");
  CHECK_FALSE(prepare(1).reused);
  io::remove_all(path);
  CHECK_FALSE(prepare(1).reused);
  CHECK(prepare(1).reused);
}

TEST_CASE("a vocabulary beyond two bytes gets four") {
  test::temporary_folder const folder;
  test::put(folder / "text", "text");
  auto const narrow = data::prepare_text(folder / "text", folder / "a.bin", shifted_bytes{65280});
  auto const wide = data::prepare_text(folder / "text", folder / "b.bin", shifted_bytes{65281});
  CHECK(narrow.tokens.tokens().width() == data::token_width::two);
  CHECK(wide.tokens.tokens().width() == data::token_width::four);
  CHECK(all_of(wide.tokens)[0] == 't' + 65281);
}

TEST_CASE("a text that takes several stretches gives the tokens of the whole") {
  test::temporary_folder const folder;
  std::string text;
  for (int line = 0; text.size() < (std::size_t{17} << 20); ++line)
    text += "line " + std::to_string(line) + (line % 3 == 0 ? "\n\n" : "\n");
  test::put(folder / "text", text);
  auto const prepared = data::prepare_text(folder / "text", folder / "tokens.bin", data::byte_tokenizer{});
  REQUIRE(prepared.tokens.size() == static_cast<index_t>(text.size()));
  CHECK(data::byte_tokenizer{}.decode(all_of(prepared.tokens)) == text);
  CHECK(data::tokens_of_file(folder / "text", data::byte_tokenizer{}) == all_of(prepared.tokens));
}

TEST_CASE("a missing or empty text, and a place that cannot be written, are errors that name the path") {
  test::temporary_folder const folder;
  auto const error = [&](std::string const& text, std::string const& cache) {
    return test::error_of<io_error>([&] { data::prepare_text(text, cache, data::byte_tokenizer{}); });
  };
  test::put(folder / "empty", "");
  test::put(folder / "text", "text");
  CHECK(error(folder / "missing", folder / "tokens.bin").says("missing"));
  CHECK(error(folder / "empty", folder / "tokens.bin").id == "E-io-003");
  CHECK(error(folder / "text", folder / "no/tokens.bin").id == "E-io-004");
  CHECK(test::error_of<io_error>([&] {
          data::tokens_of_file(folder / "empty", data::byte_tokenizer{});
        }).id == "E-io-003");
}
