#include <doctest/doctest.h>

#include <cmath>
#include <map>
#include <string>

#include <tessera/data/text_statistics.hpp>

using namespace tessera;

namespace {

/// The definitions, written down: -sum p ln p, and -sum p(ab) ln p(b | a).
double plain_unigram(std::string const& text) {
  std::map<char, double> counts;
  for (char c : text) counts[c] += 1;
  double entropy = 0;
  for (auto const& [c, count] : counts) {
    auto const p = count / double(text.size());
    entropy -= p * std::log(p);
  }
  return entropy;
}

double plain_bigram(std::string const& text) {
  std::map<std::pair<char, char>, double> pairs;
  std::map<char, double> before;
  for (std::size_t n = 1; n < text.size(); ++n) {
    pairs[{text[n - 1], text[n]}] += 1;
    before[text[n - 1]] += 1;
  }
  double entropy = 0;
  for (auto const& [pair, count] : pairs)
    entropy -= count / double(text.size() - 1) * std::log(count / before[pair.first]);
  return entropy;
}

} // namespace

TEST_CASE("entropies of texts whose answer is known") {
  auto const coin = data::text_statistics_of("abababab");
  CHECK(coin.bytes == 8);
  CHECK(coin.unigram_entropy == doctest::Approx(std::log(2.0)).epsilon(1e-14));
  CHECK(coin.bigram_entropy == 0.0);
  // after a: a or b, equally often; after b: always a.
  auto const half = data::text_statistics_of("aabaabaab");
  CHECK(half.unigram_entropy == doctest::Approx(std::log(3.0) - 2.0 / 3 * std::log(2.0)).epsilon(1e-14));
  CHECK(half.bigram_entropy == doctest::Approx(6.0 / 8 * std::log(2.0)).epsilon(1e-14));
  std::string all;
  for (int n = 0; n < 256; ++n) all += static_cast<char>(n);
  CHECK(data::text_statistics_of(all).unigram_entropy == doctest::Approx(std::log(256.0)).epsilon(1e-14));
  CHECK(data::text_statistics_of(all).bigram_entropy == 0.0);
}

TEST_CASE("texts too short for any uncertainty have none") {
  for (auto const* text : {"", "a", "aa", "aaaaaaa"}) {
    auto const marks = data::text_statistics_of(text);
    CHECK(marks.unigram_entropy == 0.0);
    CHECK(marks.bigram_entropy == 0.0);
  }
  auto const two = data::text_statistics_of("ab");
  CHECK(two.unigram_entropy == doctest::Approx(std::log(2.0)).epsilon(1e-14));
  CHECK(two.bigram_entropy == 0.0);
}

TEST_CASE("entropies of arbitrary bytes agree with the definitions") {
  std::uint64_t state = 1;
  for (std::size_t size : {3u, 100u, 1009u, 50'000u})
    for (unsigned values : {2u, 17u, 256u}) {
      std::string text(size, '\0');
      for (auto& c : text) {
        state = state * 6364136223846793005u + 1442695040888963407u;
        c = static_cast<char>((state >> 40) % values * ((state >> 33) % 3 + 1) % 256);
      }
      auto const marks = data::text_statistics_of(text);
      CHECK(marks.unigram_entropy == doctest::Approx(plain_unigram(text)).epsilon(1e-12));
      CHECK(marks.bigram_entropy == doctest::Approx(plain_bigram(text)).epsilon(1e-12));
      CHECK(marks.bigram_entropy <= std::log(double(values) * 3));
    }
}
