#include <tessera/core/philox.hpp>

#include <set>

#include <doctest/doctest.h>

using tessera::philox;

namespace {

bool same(philox::block a, philox::block b) {
  return a.word[0] == b.word[0] && a.word[1] == b.word[1] && a.word[2] == b.word[2] && a.word[3] == b.word[3];
}

} // namespace

TEST_CASE("the bijection gives the known answers that Random123 publishes for philox4x32-10") {
  CHECK(same(philox::rounds({{0, 0, 0, 0}}, 0, 0), {{0x6627e8d5u, 0xe169c58du, 0xbc57ac4cu, 0x9b00dbd8u}}));
  CHECK(same(philox::rounds({{~0u, ~0u, ~0u, ~0u}}, ~0u, ~0u),
             {{0x408f276du, 0x41c83b0eu, 0xa20bc7c6u, 0x6d5451fdu}}));
  CHECK(same(philox::rounds({{0x243f6a88u, 0x85a308d3u, 0x13198a2eu, 0x03707344u}}, 0xa4093822u, 0x299f31d0u),
             {{0xd16cfe09u, 0x94fdccebu, 0x5001e420u, 0x24126ea1u}}));
}

TEST_CASE("it runs at compile time") {
  static_assert(philox::rounds({{0, 0, 0, 0}}, 0, 0).word[0] == 0x6627e8d5u);
  static_assert(philox(1, 2).uniform(3) < 1.0f);
}

TEST_CASE("index and stream fill the counter, the seed is the key") {
  philox const random(0x299f31d0a4093822u, 0x0370734413198a2eu);
  CHECK(same(random.words(0x85a308d3243f6a88u), {{0xd16cfe09u, 0x94fdccebu, 0x5001e420u, 0x24126ea1u}}));
}

TEST_CASE("bits of elements 4q to 4q + 3 are the words of counter q, beyond 2^32 too") {
  philox const random(7, 9);
  for (std::uint64_t q :
       {std::uint64_t{0}, std::uint64_t{5}, std::uint64_t{1} << 33, (std::uint64_t{1} << 62) - 1})
    for (std::uint64_t w = 0; w < 4; ++w) CHECK(random.bits(4 * q + w) == random.words(q).word[w]);
}

TEST_CASE("other seeds, streams and indices give other numbers") {
  std::set<std::uint32_t> seen;
  for (std::uint64_t i = 0; i < 16; ++i) {
    seen.insert(philox(i, 100).bits(0));
    seen.insert(philox(100, i).bits(0));
    seen.insert(philox(100, 100).bits(i << 34));
  }
  CHECK(seen.size() == 48);
}

TEST_CASE("uniform numbers lie in [0, 1), on a grid of 2^-24, with mean 1/2 and variance 1/12") {
  CHECK(philox::unit_interval(0) == 0.0f);
  CHECK(philox::unit_interval(~0u) == 1.0f - 0x1p-24f);
  philox const random(1);
  double sum = 0, squares = 0;
  int const n = 200000;
  for (int i = 0; i < n; ++i) {
    auto const u = static_cast<double>(random.uniform(static_cast<std::uint64_t>(i)));
    sum += u;
    squares += u * u;
  }
  CHECK(sum / n == doctest::Approx(0.5).epsilon(0.01));
  CHECK(squares / n - sum / n * sum / n == doctest::Approx(1.0 / 12).epsilon(0.01));
}

TEST_CASE("normal numbers have the moments of a standard normal, and pairs are uncorrelated") {
  philox const random(2, 5);
  double moment[5] = {}, product = 0;
  int const n = 200000;
  for (int i = 0; i < n; ++i) {
    auto const x = static_cast<double>(random.normal(static_cast<std::uint64_t>(i)));
    CHECK_UNARY(std::isfinite(x));
    double power = 1;
    for (auto& m : moment) {
      m += power / n;
      power *= x;
    }
    if (i % 2 == 1)
      product += x * static_cast<double>(random.normal(static_cast<std::uint64_t>(i - 1))) / (n / 2.0);
  }
  CHECK(std::fabs(moment[1]) < 0.01);
  CHECK(moment[2] == doctest::Approx(1).epsilon(0.02));
  CHECK(std::fabs(moment[3]) < 0.05);
  CHECK(moment[4] == doctest::Approx(3).epsilon(0.05));
  CHECK(std::fabs(product) < 0.02);
}
