#include <doctest/doctest.h>

#include <algorithm>
#include <cmath>
#include <map>
#include <numeric>

#include <tessera/data/sampler.hpp>

#include "support/thrown.hpp"

using namespace tessera;

namespace {

std::vector<index_t> epoch_of(data::sampler const& order, index_t epoch) {
  std::vector<index_t> samples;
  for (index_t n = 0; n < order.samples(); ++n)
    samples.push_back(order.sample_at(epoch * order.samples() + n));
  return samples;
}

bool is_permutation_of_all(std::vector<index_t> samples) {
  std::sort(samples.begin(), samples.end());
  for (std::size_t n = 0; n < samples.size(); ++n)
    if (samples[n] != static_cast<index_t>(n)) return false;
  return true;
}

} // namespace

TEST_CASE("the order is the one that an independent program computes from the description") {
  // Python, from the papers: Philox4x32-10 checked against Random123's known answers, FNV-1a, Feistel
  // network.
  data::sampler const ten(10, {.seed = 7});
  std::vector<index_t> const first{2, 4, 5, 3, 0, 7, 9, 1, 6, 8}, second{1, 6, 7, 3, 2, 8, 0, 4, 9, 5};
  CHECK(epoch_of(ten, 0) == first);
  CHECK(epoch_of(ten, 1) == second);
  data::sampler const million(1'000'003, {.seed = 0x0123456789abcdef});
  CHECK(million.sample_at(0) == 795990);
  CHECK(million.sample_at(1) == 598993);
  CHECK(million.sample_at(2) == 91329);
  CHECK(million.sample_at(1'000'002) == 171351);
  CHECK(million.sample_at(1'000'003) == 448598);
  CHECK(million.sample_at(5'000'000'000'000) == 57609);
  index_t const huge = (index_t{1} << 62) + 12345;
  data::sampler const largest(huge, {.seed = 1});
  CHECK(largest.sample_at(0) == 2471160572123057670);
  CHECK(largest.sample_at(1) == 579344787085873308);
  CHECK(largest.sample_at(huge - 1) == 3509764289944277115);
  CHECK(largest.sample_at(huge) == 2388693643943796425);
  data::keyed_permutation const prime(97, 3, 5);
  std::vector<index_t> const expected{61, 83, 68, 24, 46, 27, 54, 89, 10, 65, 48, 12};
  for (std::size_t n = 0; n < expected.size(); ++n) CHECK(prime(static_cast<index_t>(n)) == expected[n]);
}

TEST_CASE("every epoch visits every sample once") {
  for (index_t samples : {1, 2, 3, 4, 5, 63, 64, 65, 97, 255, 256, 257, 1021, 4096, 65537})
    for (index_t epoch : {index_t{0}, index_t{1}, index_t{2}, index_t{1'000'000'007}})
      for (std::uint64_t seed : {std::uint64_t{0}, ~std::uint64_t{0}}) {
        CAPTURE(samples);
        CAPTURE(epoch);
        REQUIRE(is_permutation_of_all(epoch_of(data::sampler(samples, {.seed = seed}), epoch)));
      }
}

TEST_CASE("epochs and seeds have orders of their own") {
  data::sampler const a(1000, {.seed = 1}), b(1000, {.seed = 2});
  auto const fixed_points = [](std::vector<index_t> const& x, std::vector<index_t> const& y) {
    int equal = 0;
    for (std::size_t n = 0; n < x.size(); ++n) equal += x[n] == y[n];
    return equal;
  };
  std::vector<index_t> identity(1000);
  std::iota(identity.begin(), identity.end(), 0);
  // Of two unrelated orders one place in a thousand agrees: Poisson with mean 1.
  CHECK(fixed_points(epoch_of(a, 0), epoch_of(a, 1)) < 10);
  CHECK(fixed_points(epoch_of(a, 0), epoch_of(b, 0)) < 10);
  CHECK(fixed_points(epoch_of(a, 0), identity) < 10);
  CHECK(epoch_of(a, 3) == epoch_of(data::sampler(1000, {.seed = 1}), 3));
}

TEST_CASE("all orders of a few samples are equally frequent") {
  for (index_t samples : {2, 3, 4, 5}) {
    std::map<std::vector<index_t>, int> seen;
    index_t orders = 1;
    for (index_t n = 2; n <= samples; ++n) orders *= n;
    constexpr int each = 100;
    for (index_t epoch = 0; epoch < each * orders; ++epoch)
      ++seen[epoch_of(data::sampler(samples, {.seed = 5}), epoch)];
    double chi_square = 0;
    for (auto const& [order, count] : seen) chi_square += (count - each) * (count - each) / double(each);
    chi_square += double(orders - static_cast<index_t>(seen.size())) * each;
    auto const freedom = double(orders - 1);
    CAPTURE(samples);
    CHECK(chi_square < freedom + 4 * std::sqrt(2 * freedom));
  }
}

TEST_CASE("a sample's place and its neighbour's are unrelated") {
  index_t const samples = 20'011;
  auto const order = epoch_of(data::sampler(samples, {.seed = 3}), 0);
  auto const mean = double(samples - 1) / 2;
  double with_place = 0, with_next = 0, variance = 0;
  for (std::size_t n = 0; n + 1 < order.size(); ++n) {
    auto const here = double(order[n]) - mean;
    with_place += here * (double(n) - mean);
    with_next += here * (double(order[n + 1]) - mean);
    variance += here * here;
  }
  // Correlations of unrelated numbers have a deviation of 1 / sqrt(n).
  auto const bound = 4 / std::sqrt(double(samples));
  CHECK(std::abs(with_place / variance) < bound);
  CHECK(std::abs(with_next / variance) < bound);
}

TEST_CASE("without shuffling samples come in their own order") {
  data::sampler const order(5, {.seed = 3, .shuffle = false});
  CHECK(epoch_of(order, 0) == std::vector<index_t>{0, 1, 2, 3, 4});
  CHECK(order.sample_at(12) == 2);
  CHECK(order.epoch_of(12) == 2);
}

TEST_CASE("nothing to sample from, and places outside, are errors") {
  CHECK(test::error_of<size_error>([] { data::sampler order(0); }).id == "E-data-007");
  CHECK(test::error_of<size_error>([] { data::sampler(3).sample_at(-1); }).id == "E-data-007");
  data::keyed_permutation const permutation(3, 0, 0);
  CHECK(test::error_of<size_error>([&] { permutation(3); }).id == "E-data-006");
  CHECK(test::error_of<size_error>([&] { permutation(-1); }).id == "E-data-006");
  CHECK(test::error_of<size_error>([] { data::keyed_permutation(-1, 0, 0); }).id == "E-data-006");
}
