// requires: sentencepiece
#include <doctest/doctest.h>

#include <unistd.h>

#include <tessera/data/sentencepiece.hpp>

#include "data/conformance.hpp"
#include "support/temporary_folder.hpp"

using namespace tessera;

namespace {

/// A text with the structure of prose: words of a small vocabulary in a fixed irregular order.
std::string prose() {
  char const* const words[] = {"the ",   "beginning ", "and ", "earth ",  "waters ", "light ", "was ", "God ",
                               "said, ", "of ",        "day ", "heaven ", "upon ",   "face ",  "it. ", "\n"};
  std::string text;
  std::uint32_t state = 1;
  for (int n = 0; n < 4000; ++n) {
    state = state * 1664525u + 1013904223u;
    text += words[state >> 28];
  }
  return text + "caf\u00e9\n";
}

data::sentencepiece_tokenizer const& trained() {
  static data::sentencepiece_tokenizer const tokenizer =
      data::train_sentencepiece(prose(), {.vocabulary_size = 330});
  return tokenizer;
}

/// What is written to standard error and output while `f` runs.
template <class F>
std::string output_of(std::string const& path, F f) {
  std::fflush(nullptr);
  auto const file = ::open(path.c_str(), O_RDWR | O_CREAT | O_TRUNC, 0600);
  int const kept[] = {::dup(1), ::dup(2)};
  ::dup2(file, 1);
  ::dup2(file, 2);
  f();
  std::fflush(nullptr);
  ::dup2(kept[0], 1);
  ::dup2(kept[1], 2);
  for (int descriptor : {file, kept[0], kept[1]}) ::close(descriptor);
  return test::contents_of(path);
}

} // namespace

TEST_CASE("a trained tokenizer gives every text back") {
  static_assert(data::tokenizer<data::sentencepiece_tokenizer>);
  test::check_tokenizer(trained());
}

TEST_CASE("a trained tokenizer has the size asked for and shortens its own text") {
  auto const text = prose();
  CHECK(trained().vocabulary_size() == 330);
  auto const tokens = trained().encode(text);
  CHECK(tokens.size() * 2 < text.size());
  CHECK(trained().decode(tokens) == text);
}

TEST_CASE("lines are encoded independently of each other") {
  std::string const first = "In the beginning\n", second = "was the light\n";
  auto joined = trained().encode(first);
  auto const more = trained().encode(second);
  joined.insert(joined.end(), more.begin(), more.end());
  CHECK(trained().encode(first + second) == joined);
}

TEST_CASE("training twice gives the same model, and says nothing") {
  test::temporary_folder const folder;
  std::string model;
  auto const output = output_of(folder / "output", [&] {
    model = data::train_sentencepiece(prose(), {.vocabulary_size = 330}).model();
  });
  CHECK(output == "");
  CHECK(model == trained().model());
  CHECK(data::train_sentencepiece(prose(), {.vocabulary_size = 320}).fingerprint() !=
        trained().fingerprint());
}

TEST_CASE("a saved model encodes as the trained one") {
  test::temporary_folder const folder;
  trained().save(folder / "tokenizer.model");
  auto const loaded = data::load_sentencepiece(folder / "tokenizer.model");
  CHECK(loaded.fingerprint() == trained().fingerprint());
  CHECK(loaded.encode(prose()) == trained().encode(prose()));
  auto moved = data::load_sentencepiece(folder / "tokenizer.model");
  auto const tokenizer = std::move(moved);
  CHECK(tokenizer.decode(tokenizer.encode("moved \xff")) == "moved \xff");
}

TEST_CASE("files that are no models are refused, and cut ones never crash") {
  test::temporary_folder const folder;
  auto const load_error = [&](std::string const& bytes) {
    test::put(folder / "tokenizer.model", bytes);
    return test::error_of<io_error>([&] { data::load_sentencepiece(folder / "tokenizer.model"); }).id;
  };
  CHECK(load_error("") == "E-io-003");
  CHECK(load_error("In the beginning God created the heaven and the earth.") == "E-data-012");
  auto const& model = trained().model();
  for (std::size_t eighths = 1; eighths < 8; ++eighths)
    CHECK(load_error(model.substr(0, model.size() * eighths / 8)) == "E-data-012");
  CHECK(test::error_of<io_error>([&] { data::load_sentencepiece(folder / "missing"); }).id == "E-io-001");
}

TEST_CASE("a model that changes text is refused") {
  // Sentencepiece's own defaults, but for the byte tokens.
  auto const text = prose();
  data::detail::line_iterator lines(text, 1 << 20);
  std::string model;
  std::unordered_map<std::string, std::string> const settings{
      {"model_type", "bpe"}, {"vocab_size", "330"}, {"byte_fallback", "true"}, {"minloglevel", "3"}};
  REQUIRE(sentencepiece::SentencePieceTrainer::Train(settings, &lines, &model).ok());
  auto const error =
      test::error_of<io_error>([&] { data::sentencepiece_tokenizer tokenizer(model, "their.model"); });
  CHECK(error.id == "E-data-012");
  CHECK(error.says("their.model changes text"));
}

TEST_CASE("vocabularies that the text cannot give are errors that say so") {
  auto const train_error = [](std::string const& text, index_t size) {
    return test::error_of<config_error>([&] { data::train_sentencepiece(text, {.vocabulary_size = size}); });
  };
  CHECK(train_error(prose(), 257).id == "E-data-014");
  CHECK(train_error(prose(), -1).id == "E-data-014");
  CHECK(train_error(prose(), 1 << 20).says("no vocabulary of 1048576 pieces can be learnt"));
  CHECK(train_error("abcdefghij", 260).id == "E-data-014");
  CHECK(train_error(std::string(3, '\0'), 300).id == "E-data-014");
  CHECK(test::error_of<size_error>([] { data::train_sentencepiece("", {}); }).id == "E-data-009");
  CHECK(test::error_of<size_error>([] { data::train_sentencepiece("\n\n", {}); }).id == "E-data-009");
}

TEST_CASE("a long text is trained on about as much of it as was asked for") {
  auto const text = prose();
  data::detail::line_iterator lines(text, static_cast<index_t>(text.size() / 5 + 1));
  std::size_t read = 0, empty = 0;
  for (; !lines.done(); lines.Next()) {
    read += lines.value().size();
    empty += lines.value().empty();
  }
  CHECK(empty == 0);
  CHECK(read > text.size() / 7);
  CHECK(read < text.size() / 3);
  std::string rebuilt;
  for (data::detail::line_iterator all(text, 1 << 30); !all.done(); all.Next()) rebuilt += all.value();
  std::string without_newlines;
  for (char c : text)
    if (c != '\n') without_newlines += c;
  CHECK(rebuilt == without_newlines);
}

TEST_CASE("long lines are cut between words, and never within a character") {
  std::string text(4095, 'a');
  text += "\u4e2d\u6587 \xff";
  std::string_view rest = text;
  std::string rebuilt;
  while (!rest.empty()) {
    auto const line = data::detail::take_line(rest);
    REQUIRE(!line.empty());
    CHECK(line.size() <= 4096);
    CHECK((static_cast<unsigned char>(line.front()) & 0xC0u) != 0x80u);
    rebuilt += line;
  }
  CHECK(rebuilt == text);
}
