// requires: sentencepiece json xxhash
#include <doctest/doctest.h>

#include <tessera/data/prepare.hpp>
#include <tessera/data/prepare_sentencepiece.hpp>

#include "support/temporary_folder.hpp"
#include "support/thrown.hpp"

using namespace tessera;

namespace {

std::string text_about(std::string const& what) {
  std::string text;
  for (int n = 0; n < 300; ++n)
    text += "In the beginning was the " + what + " and line " + std::to_string(n) + "\n";
  return text;
}

} // namespace

TEST_CASE("a model is trained once, found again, and trained anew for another text or size") {
  test::temporary_folder const folder;
  auto const model = folder / "tokenizer.model";
  auto const prepare = [&](index_t size) {
    return data::prepare_sentencepiece(folder / "text", model, {.vocabulary_size = size}).fingerprint();
  };
  test::put(folder / "text", text_about("word"));
  auto const first = prepare(310);
  auto const written = std::filesystem::last_write_time(model);
  CHECK(prepare(310) == first);
  CHECK(std::filesystem::last_write_time(model) == written);
  CHECK(prepare(300) != first);
  CHECK(prepare(310) == first);
  test::put(folder / "text", text_about("bird"));
  CHECK(prepare(310) != first);
  test::put(folder / "text", text_about("word"));
  test::put(model, "damaged");
  CHECK(prepare(310) == first);
}

TEST_CASE("a text prepared with a trained tokenizer comes back") {
  test::temporary_folder const folder;
  test::put(folder / "text", text_about("word"));
  auto const tokenizer =
      data::prepare_sentencepiece(folder / "text", folder / "tokenizer.model", {.vocabulary_size = 310});
  auto const prepared = data::prepare_text(folder / "text", folder / "tokens.bin", tokenizer);
  std::vector<std::int32_t> tokens(static_cast<std::size_t>(prepared.tokens.size()));
  prepared.tokens.tokens().copy(0, tokens, tokenizer.vocabulary_size());
  CHECK(tokenizer.decode(tokens) == text_about("word"));
  CHECK(prepared.tokens.size() < prepared.text_bytes / 2);
}

TEST_CASE("a missing or empty text is an error that names the path") {
  test::temporary_folder const folder;
  test::put(folder / "empty", "");
  for (auto const* name : {"missing", "empty"})
    CHECK(test::error_of<io_error>([&] {
            data::prepare_sentencepiece(folder / name, folder / "tokenizer.model", {});
          }).says(name));
}
