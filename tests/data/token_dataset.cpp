#include <doctest/doctest.h>

#include <numeric>

#include <tessera/data/token_dataset.hpp>

#include "support/thrown.hpp"

using namespace tessera;

namespace {

std::vector<std::int32_t> counting(index_t count) {
  std::vector<std::int32_t> tokens(static_cast<std::size_t>(count));
  std::iota(tokens.begin(), tokens.end(), 0);
  return tokens;
}

test::thrown refused(std::vector<std::int32_t> const& tokens, data::token_dataset_options options) {
  return test::error_of<size_error>([&] { data::token_dataset dataset(tokens, options); });
}

struct share_of_validation {
  double fraction;
  index_t validation;
};

} // namespace

TEST_CASE("samples are the sequences that lie end to end, targets the same one token later") {
  for (index_t length : {1, 2, 3, 7})
    for (index_t count = length + 1; count < 30; ++count) {
      CAPTURE(length);
      CAPTURE(count);
      auto const tokens = counting(count);
      data::token_dataset const dataset(tokens, {.sequence_length = length, .vocabulary_size = 30});
      index_t expected = 0;
      for (index_t begin = 0; begin + length + 1 <= count; begin += length) ++expected;
      REQUIRE(dataset.size() == expected);
      std::vector<std::int32_t> in(static_cast<std::size_t>(length)), targets(in);
      for (index_t sample = 0; sample < expected; ++sample) {
        dataset.fill(sample, in, targets);
        for (std::size_t n = 0; n < in.size(); ++n) {
          REQUIRE(in[n] == sample * length + static_cast<index_t>(n));
          REQUIRE(targets[n] == in[n] + 1);
        }
      }
    }
}

TEST_CASE("training and validation share no sample and lose none") {
  auto const tokens = counting(101); // ten samples of ten
  data::token_dataset const dataset(tokens, {.sequence_length = 10, .vocabulary_size = 101});
  std::vector<std::int32_t> in(10), targets(10);
  for (auto const& share :
       {share_of_validation{0.1, 1}, {0.3, 3}, {0.35, 4}, {0.5, 5}, {0.001, 1}, {0.999, 9}}) {
    CAPTURE(share.fraction);
    auto const validation = share.validation;
    auto const parts = dataset.split(share.fraction);
    REQUIRE(parts.validation.size() == validation);
    REQUIRE(parts.training.size() == 10 - validation);
    CHECK(parts.training.sequence_length() == 10);
    CHECK(parts.validation.vocabulary_size() == 101);
    parts.training.fill(parts.training.size() - 1, in, targets);
    CHECK(targets.back() == 10 * (10 - validation));
    parts.validation.fill(0, in, targets);
    CHECK(in.front() == 10 * (10 - validation));
    parts.validation.fill(parts.validation.size() - 1, in, targets);
    CHECK(targets.back() == 100);
  }
  for (double fraction : {0.0, 1.0, -0.1, 1.5, std::nan("")})
    CHECK(test::error_of<config_error>([&] { dataset.split(fraction); }).id == "E-data-011");
  auto const one = dataset.subset(9, 1);
  CHECK(one.size() == 1);
  CHECK(test::error_of<size_error>([&] { one.split(0.5); }).id == "E-data-009");
  CHECK(test::error_of<size_error>([&] { dataset.subset(9, 2); }).id == "E-data-010");
  CHECK(test::error_of<size_error>([&] { dataset.subset(0, 0); }).id == "E-data-010");
  CHECK(test::error_of<size_error>([&] { dataset.subset(-1, 1); }).id == "E-data-010");
}

TEST_CASE("data that is empty or shorter than a sequence is an error that says what is needed") {
  data::token_dataset_options const options{.sequence_length = 8, .vocabulary_size = 100};
  CHECK(refused({}, options).says("no tokens"));
  CHECK(refused(counting(8), options).id == "E-data-009");
  CHECK(refused(counting(8), options).says("holds 8 tokens; one sequence of 8 and its last target take 9"));
  CHECK(refused(counting(9), options).id == "nothing was thrown");
  auto const tokens = counting(9);
  for (auto const& impossible : {data::token_dataset_options{0, 10}, data::token_dataset_options{8, 0}})
    CHECK(test::error_of<config_error>([&] { data::token_dataset dataset(tokens, impossible); }).id ==
          "E-data-008");
}

TEST_CASE("a token outside the vocabulary is found when it is used, or all at once") {
  auto tokens = counting(31);
  tokens[13] = 31;
  data::token_dataset const dataset(tokens, {.sequence_length = 10, .vocabulary_size = 31});
  std::vector<std::int32_t> in(10), targets(10);
  dataset.fill(0, in, targets);
  CHECK(test::error_of<size_error>([&] { dataset.fill(1, in, targets); }).says("token 13 is 31"));
  CHECK(test::error_of<size_error>([&] { dataset.check(); }).says("token 13 is 31"));
  tokens[13] = 0;
  tokens[30] = -1; // only a target
  CHECK(test::error_of<size_error>([&] { dataset.fill(2, in, targets); }).id == "E-data-003");
}

TEST_CASE("samples that are not there, and spans of another length, are errors") {
  auto const tokens = counting(31);
  data::token_dataset const dataset(tokens, {.sequence_length = 10, .vocabulary_size = 31});
  std::vector<std::int32_t> ten(10), nine(9);
  CHECK(test::error_of<size_error>([&] { dataset.fill(3, ten, ten); }).id == "E-data-010");
  CHECK(test::error_of<size_error>([&] { dataset.fill(-1, ten, ten); }).id == "E-data-010");
  CHECK(test::error_of<size_error>([&] { dataset.fill(0, nine, ten); }).id == "E-data-010");
  CHECK(test::error_of<size_error>([&] { dataset.fill(0, ten, nine); }).id == "E-data-010");
}
