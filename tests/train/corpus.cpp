#include <doctest/doctest.h>

#include <atomic>

#include <support/ranks.hpp>
#include <support/temporary_folder.hpp>
#include <support/thrown.hpp>

#include <tessera/comm/self.hpp>
#include <tessera/train/corpus.hpp>

using namespace tessera;

namespace {

std::string verses() {
  std::string text;
  for (int i = 0; i < 500; ++i) text += "verse " + std::to_string(i * i) + " of the book\n";
  return text;
}

train::settings settings_for(test::temporary_folder const& folder) {
  train::settings s;
  s.data = folder / "text.txt";
  s.run = folder / "run";
  s.sequence_length = 10;
  s.validation_share = 0.1;
  return s;
}

} // namespace

TEST_CASE("every rank opens the same tokens, in both tokenizers, and they are the text") {
  test::temporary_folder folder;
  auto const text = verses();
  test::put(folder / "text.txt", text);
  for (auto const* name : {"bytes", "sentencepiece"}) {
    auto s = settings_for(folder);
    s.tokenizer = name;
    s.vocabulary = s.tokenizer == "bytes" ? 0 : 300;
    std::string fingerprints[3];
    comm::run_threads(3, [&](comm::threads& ranks) {
      auto const c = train::open_corpus(ranks, s);
      fingerprints[ranks.rank()] = c.fingerprint;
      CHECK(c.vocabulary == (s.tokenizer == "bytes" ? 256 : 300));
      std::vector<std::int32_t> tokens(static_cast<std::size_t>(c.file.size()));
      c.file.tokens().copy(0, tokens, c.vocabulary);
      CHECK(c.tokenizer.decode(tokens) == text);
      CHECK(c.statistics.bytes == static_cast<index_t>(text.size()));
      CHECK(c.statistics.bigram_entropy < c.statistics.unigram_entropy);
      auto const mean = static_cast<double>(text.size()) / static_cast<double>(tokens.size());
      CHECK(c.training_bytes_per_token == doctest::Approx(mean).epsilon(0.1));
      CHECK(c.validation_bytes_per_token == doctest::Approx(mean).epsilon(0.2));
      CHECK(c.training.size() ==
            doctest::Approx(9.0 * static_cast<double>(c.validation.size())).epsilon(0.05));
    });
    CHECK(fingerprints[0] == fingerprints[1]);
    CHECK(fingerprints[0] == fingerprints[2]);
  }
}

TEST_CASE("the fingerprint is the text's, not its path's") {
  test::temporary_folder folder;
  auto s = settings_for(folder);
  std::string prints[3];
  comm::self alone;
  for (int i = 0; i < 3; ++i) {
    s.data = folder / ("text-" + std::to_string(i));
    test::put(s.data, verses() + (i == 2 ? "more\n" : ""));
    prints[i] = train::open_corpus(alone, s).fingerprint;
  }
  CHECK(prints[0] == prints[1]);
  CHECK(prints[0] != prints[2]);
}

TEST_CASE("a token file is used as it is") {
  test::temporary_folder folder;
  auto s = settings_for(folder);
  s.data = folder / "tokens.bin";
  s.tokenizer = "tokens";
  s.vocabulary = 70000;
  std::vector<std::int32_t> tokens;
  for (int i = 0; i < 300; ++i) tokens.push_back(i * 233);
  data::token_writer writer(s.data, data::token_width::four);
  writer.append(tokens);
  writer.commit();
  comm::self alone;
  auto const c = train::open_corpus(alone, s);
  CHECK(c.vocabulary == 70000);
  CHECK_FALSE(c.tokenizer.has_text());
  CHECK(c.training_bytes_per_token == 0);
  CHECK(c.statistics.bytes == 0);
}

TEST_CASE("data that cannot be used is an error on every rank") {
  test::temporary_folder folder;
  test::put(folder / "empty", "");
  test::put(folder / "short", "abc");
  for (auto const* name : {"missing", "empty", "short"}) {
    CAPTURE(std::string(name));
    auto s = settings_for(folder);
    s.data = folder / name;
    std::atomic<int> failed = 0;
    comm::run_threads(2, [&](comm::threads& ranks) {
      try {
        (void)train::open_corpus(ranks, s);
      } catch (error const&) {
        ++failed;
      }
    });
    CHECK(failed == 2);
  }
}
