#include <doctest/doctest.h>

#include <support/thrown.hpp>

#include <tessera/train/text_tokenizer.hpp>

using namespace tessera;
using train::text_tokenizer;

namespace {

std::string many_words() {
  std::string text;
  for (int i = 0; i < 400; ++i) text += "the waters of the earth " + std::to_string(i * 7919) + "\n";
  return text;
}

} // namespace

TEST_CASE("bytes and a learnt vocabulary give the text back and know how long each token is") {
  auto const text = many_words();
  for (auto const& tokenizer : {text_tokenizer("bytes", {}),
                                text_tokenizer(data::train_sentencepiece(text, {.vocabulary_size = 400}))}) {
    auto const tokens = tokenizer.encode(text);
    CHECK(tokenizer.decode(tokens) == text);
    auto const bytes = tokenizer.bytes_of_tokens();
    CHECK(static_cast<index_t>(bytes.size()) == tokenizer.vocabulary_size());
    index_t sum = 0;
    for (auto token : tokens) sum += bytes[static_cast<std::size_t>(token)];
    CHECK(sum == static_cast<index_t>(text.size()));
  }
}

TEST_CASE("name and model make the same tokenizer again") {
  auto const text = many_words();
  auto const learnt = text_tokenizer(data::train_sentencepiece(text, {.vocabulary_size = 400}));
  auto const again = text_tokenizer("sentencepiece", learnt.model());
  CHECK(again.encode(text) == learnt.encode(text));
  CHECK(text_tokenizer("bytes", {}).model().empty());
}

TEST_CASE("a run on a token file has no text, and an unknown name no tokenizer") {
  auto const none = text_tokenizer("tokens", {});
  CHECK_FALSE(none.has_text());
  CHECK(test::error_of<config_error>([&] { none.encode("x"); }).id == "E-train-046");
  CHECK(test::error_of<config_error>([&] { none.vocabulary_size(); }).id == "E-train-046");
  CHECK(test::error_of<config_error>([] { text_tokenizer("words", {}); }).id == "E-train-045");
  CHECK(test::error_of<io_error>([] { text_tokenizer("sentencepiece", "no model"); }).id == "E-data-012");
}
