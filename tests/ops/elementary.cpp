#include <tessera/ops/elementary.hpp>

#include <cmath>
#include <initializer_list>

#include <doctest/doctest.h>

namespace el = tessera::ops::elementary;

namespace {

struct worst_case {
  double units = 0; ///< In the last place of the true value.
  float at = 0;
  int wrong = 0; ///< Infinities, NaN or signs of zero that differ.
};

/// Every 1009th of the 2^32 bit patterns of a float (a prime, so all exponents, signs and NaN come by).
template <class F, class Exact>
worst_case against(F f, Exact exact) {
  worst_case worst;
  for (std::uint64_t bits = 0; bits < std::uint64_t{1} << 32; bits += 1009) {
    auto const x = std::bit_cast<float>(static_cast<std::uint32_t>(bits));
    auto const y = f(x);
    auto const truth = exact(static_cast<double>(x));
    auto const nearest = static_cast<float>(truth);
    if (std::isnan(nearest) || std::isinf(nearest) || std::isnan(y) || std::isinf(y)) {
      if (std::isnan(nearest) != std::isnan(y) || (!std::isnan(y) && nearest != y)) ++worst.wrong;
      continue;
    }
    if (truth == 0 && std::signbit(y) != std::signbit(nearest)) ++worst.wrong;
    auto const unit = std::fmax(0x1p-149, truth == 0 ? 0 : std::ldexp(1.0, std::ilogb(truth) - 23));
    if (auto const units = std::fabs(y - truth) / unit; units > worst.units) {
      worst.units = units;
      worst.at = x;
    }
  }
  return worst;
}

template <class F, class Exact>
void within(double bound, F f, Exact exact) {
  auto const worst = against(f, exact);
  CAPTURE(worst.at);
  CHECK(worst.wrong == 0);
  CHECK(worst.units <= bound);
}

constexpr auto infinity = INFINITY;

} // namespace

TEST_CASE("exp is within 1.5 units in the last place of double everywhere") {
  within(
      1.5, [](float x) { return el::exp(x); }, [](double x) { return std::exp(x); });
}
TEST_CASE("log is within 1.5 units in the last place of double everywhere") {
  within(
      1.5, [](float x) { return el::log(x); }, [](double x) { return std::log(x); });
}
TEST_CASE("tanh is within 1.5 units in the last place of double everywhere") {
  within(
      1.5, [](float x) { return el::tanh(x); }, [](double x) { return std::tanh(x); });
}
TEST_CASE("erf is within 1.5 units in the last place of double everywhere") {
  within(
      1.5, [](float x) { return el::erf(x); }, [](double x) { return std::erf(x); });
}
TEST_CASE("sigmoid is within 2.5 units in the last place of double everywhere") {
  within(
      2.5, [](float x) { return el::sigmoid(x); }, [](double x) { return 1 / (1 + std::exp(-x)); });
}

TEST_CASE("exp overflows, underflows and keeps NaN where the true function does") {
  CHECK(el::exp(0.0f) == 1.0f);
  CHECK(el::exp(infinity) == infinity);
  CHECK(el::exp(-infinity) == 0.0f);
  CHECK(std::isnan(el::exp(NAN)));
  CHECK(el::exp(0x1.62e43p+6f) == infinity);                       // the first float beyond log(largest)
  CHECK(std::isfinite(el::exp(0x1.62e42ep+6f)));                   // and the last one below
  CHECK(el::exp(-103.0f) == static_cast<float>(std::exp(-103.0))); // subnormal
}

TEST_CASE("log of zero, of subnormals, of negative numbers and of infinity") {
  CHECK(el::log(1.0f) == 0.0f);
  CHECK(el::log(0.0f) == -infinity);
  CHECK(el::log(-0.0f) == -infinity);
  CHECK(el::log(infinity) == infinity);
  CHECK(std::isnan(el::log(-1.0f)));
  CHECK(std::isnan(el::log(NAN)));
  CHECK(el::log(0x1p-149f) == doctest::Approx(-103.2789297));
}

TEST_CASE("tanh, erf and sigmoid reach their limits and are odd where they must be") {
  for (auto x : {0.0f, 0x1p-149f, 1e-3f, 0.5f, 0.9f, 3.0f, 20.0f, infinity}) {
    CHECK(el::tanh(-x) == -el::tanh(x));
    CHECK(el::erf(-x) == -el::erf(x));
  }
  CHECK(el::tanh(infinity) == 1.0f);
  CHECK(el::erf(infinity) == 1.0f);
  CHECK(el::sigmoid(infinity) == 1.0f);
  CHECK(el::sigmoid(-infinity) == 0.0f);
  CHECK(std::isnan(el::tanh(NAN)));
  CHECK(std::isnan(el::erf(NAN)));
  CHECK(std::isnan(el::sigmoid(NAN)));
}

TEST_CASE("select, magnitude and signs look at bits; larger and smaller keep a NaN that comes first") {
  CHECK(el::select(true, 1.0f, NAN) == 1.0f);
  CHECK(el::select(false, NAN, 2.0f) == 2.0f);
  CHECK(std::signbit(el::with_sign_of(0.0f, -3.0f)));
  CHECK(el::magnitude(-infinity) == infinity);
  CHECK(el::larger(1.0f, 2.0f) == 2.0f);
  CHECK(el::smaller(1.0f, 2.0f) == 1.0f);
  CHECK(std::isnan(el::larger(NAN, 2.0f)));
  CHECK(std::isnan(el::smaller(NAN, 2.0f)));
}
