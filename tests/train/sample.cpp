#include <doctest/doctest.h>

#include <limits>
#include <set>
#include <vector>

#include <tessera/train/sample.hpp>

using namespace tessera;
using train::sample_token;

namespace {

/// How often each token is drawn over `draws` indices, as shares.
std::vector<double> shares(std::vector<float> const& logits, train::sampling options, int draws) {
  std::vector<double> share(logits.size());
  philox const random(7);
  for (int i = 0; i < draws; ++i)
    share[static_cast<std::size_t>(sample_token(logits, options, random, static_cast<std::uint64_t>(i)))] +=
        1.0 / draws;
  return share;
}

} // namespace

TEST_CASE("temperature zero takes the most probable token, the first of equals") {
  CHECK(sample_token(std::vector<float>{1, 5, 2, 5}, {.temperature = 0}, philox(1), 3) == 1);
  CHECK(sample_token(std::vector<float>{4}, {.temperature = 0}, philox(1), 3) == 0);
}

TEST_CASE("tokens come as often as the softmax at that temperature says") {
  std::vector<float> const logits{0.5f, -1.0f, 2.0f, 1.0f, 0.0f};
  for (double temperature : {0.5, 1.0, 2.0}) {
    auto const drawn = shares(logits, {.temperature = temperature}, 40000);
    double total = 0;
    for (auto x : logits) total += std::exp(x / temperature);
    for (std::size_t i = 0; i < logits.size(); ++i)
      CHECK(drawn[i] == doctest::Approx(std::exp(logits[i] / temperature) / total).epsilon(0.01).scale(1));
  }
}

TEST_CASE("top-k leaves only the k most probable tokens, in their proportions") {
  auto const drawn = shares({0.0f, 3.0f, 2.0f, 1.0f}, {.top_k = 2}, 20000);
  CHECK(drawn[0] == 0);
  CHECK(drawn[3] == 0);
  CHECK(drawn[1] == doctest::Approx(1 / (1 + std::exp(-1.0))).epsilon(0.02));
  CHECK(shares({0.0f, 3.0f}, {.top_k = 100}, 100)[1] > 0.5);
}

TEST_CASE("top-p leaves the smallest set of tokens that reaches the probability") {
  std::vector<float> const logits{std::log(0.5f), std::log(0.3f), std::log(0.15f), std::log(0.05f)};
  auto const possible = [&](double top_p) {
    std::set<std::size_t> tokens;
    auto const drawn = shares(logits, {.top_p = top_p}, 5000);
    for (std::size_t i = 0; i < drawn.size(); ++i)
      if (drawn[i] > 0) tokens.insert(i);
    return tokens;
  };
  CHECK(possible(1e-9) == std::set<std::size_t>{0});
  CHECK(possible(0.49) == std::set<std::size_t>{0});
  CHECK(possible(0.79) == std::set<std::size_t>{0, 1});
  CHECK(possible(0.94) == std::set<std::size_t>{0, 1, 2});
  CHECK(possible(1.0) == std::set<std::size_t>{0, 1, 2, 3});
}

TEST_CASE("a token depends on seed and index alone, not on what was drawn before") {
  std::vector<float> const logits(100, 0.0f);
  auto const alone = sample_token(logits, {}, philox(3), 41);
  for (std::uint64_t i = 0; i < 41; ++i) sample_token(logits, {}, philox(3), i);
  CHECK(sample_token(logits, {}, philox(3), 41) == alone);
}

TEST_CASE("impossible options and broken logits are errors with their own types") {
  std::vector<float> const fine{1, 2};
  for (auto const& options :
       {train::sampling{.temperature = -1}, train::sampling{.top_k = -1}, train::sampling{.top_p = 0},
        train::sampling{.top_p = 1.5}, train::sampling{.temperature = std::nan("")}})
    CHECK_THROWS_AS(sample_token(fine, options, philox(1), 0), config_error);
  CHECK_THROWS_AS(sample_token({}, {}, philox(1), 0), size_error);
  auto const infinity = std::numeric_limits<float>::infinity();
  CHECK_THROWS_AS(sample_token(std::vector<float>{1, std::nanf("")}, {}, philox(1), 0), numeric_error);
  CHECK_THROWS_AS(sample_token(std::vector<float>{1, infinity}, {}, philox(1), 0), numeric_error);
  CHECK_THROWS_AS(sample_token(std::vector<float>{-infinity}, {}, philox(1), 0), numeric_error);
  CHECK(sample_token(std::vector<float>{-infinity, 0}, {}, philox(1), 0) == 1);
}
