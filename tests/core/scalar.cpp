#include <tessera/core/scalar.hpp>

#include <cmath>
#include <cstring>

#include <doctest/doctest.h>

using tessera::bf16;
using tessera::fp16;

namespace {

/// The value of a 16-bit pattern by the definition of the format, in double.
double value_of(std::uint16_t bits, int exponent_bits) {
  auto const mantissa_bits = 15 - exponent_bits;
  auto const sign = (bits & 0x8000) != 0 ? -1.0 : 1.0;
  auto const exponent = (bits & 0x7fff) >> mantissa_bits, mantissa = bits & ((1 << mantissa_bits) - 1);
  auto const bias = (1 << (exponent_bits - 1)) - 1;
  if (exponent == (1 << exponent_bits) - 1) return mantissa != 0 ? NAN : sign * INFINITY;
  if (exponent == 0) return sign * std::ldexp(mantissa, 1 - bias - mantissa_bits);
  return sign * std::ldexp(mantissa + (1 << mantissa_bits), exponent - bias - mantissa_bits);
}

/// The pattern nearest to a finite positive value, by comparing with both neighbours (ties to the even one).
std::uint16_t nearest(double value, int exponent_bits) {
  auto const infinity = static_cast<std::uint16_t>(((1 << exponent_bits) - 1) << (15 - exponent_bits));
  std::uint16_t low = 0, high = infinity; // patterns of positive numbers are in order
  while (high - low > 1) {
    auto const middle = static_cast<std::uint16_t>((low + high) / 2);
    (value_of(middle, exponent_bits) <= value ? low : high) = middle;
  }
  // Infinity stands where the next number would.
  auto const below = value_of(low, exponent_bits);
  auto const above = high == infinity
                         ? 2 * below - value_of(static_cast<std::uint16_t>(low - 1), exponent_bits)
                         : value_of(high, exponent_bits);
  if (value - below == above - value) return low % 2 == 0 ? low : high;
  return value - below < above - value ? low : high;
}

template <class S>
void all_patterns_convert(int exponent_bits) {
  int wrong_value = 0, wrong_round_trip = 0, nan_lost = 0;
  for (std::uint32_t p = 0; p < 65536; ++p) {
    auto const bits = static_cast<std::uint16_t>(p);
    auto const expected = value_of(bits, exponent_bits);
    auto const given = static_cast<float>(S::from_bits(bits));
    if (std::isnan(expected)) {
      nan_lost += !std::isnan(given) || !std::isnan(static_cast<float>(S(given)));
    } else {
      wrong_value += static_cast<double>(given) != expected || std::signbit(given) != std::signbit(expected);
      wrong_round_trip += S(given).bits != bits;
    }
  }
  CHECK(wrong_value == 0);
  CHECK(wrong_round_trip == 0);
  CHECK(nan_lost == 0);
}

/// Every midpoint between neighbours, the floats next to it, and the floats next to each number.
template <class S>
void all_roundings_are_to_nearest_even(int exponent_bits) {
  auto const infinity = static_cast<std::uint16_t>(((1 << exponent_bits) - 1) << (15 - exponent_bits));
  int wrong = 0, checked = 0;
  for (std::uint16_t p = 0; p < infinity; ++p) {
    auto const below = value_of(p, exponent_bits);
    auto const above = p + 1 == infinity
                           ? 2 * below - value_of(static_cast<std::uint16_t>(p - 1), exponent_bits)
                           : value_of(static_cast<std::uint16_t>(p + 1), exponent_bits);
    for (auto exact :
         {below, 0.75 * below + 0.25 * above, 0.5 * (below + above), 0.25 * below + 0.75 * above}) {
      auto const middle = static_cast<float>(exact);
      for (auto x : {std::nextafterf(middle, 0.0f), middle, std::nextafterf(middle, INFINITY)}) {
        if (!std::isfinite(x)) continue;
        auto const expected = nearest(static_cast<double>(x), exponent_bits);
        wrong += S(x).bits != expected;
        wrong += S(-x).bits != (expected | 0x8000);
        ++checked;
      }
    }
  }
  CHECK(wrong == 0);
  CHECK(checked > 12 * (infinity - 2));
}

} // namespace

TEST_CASE("each of the 65536 patterns of bf16 has its value, and comes back from float") {
  all_patterns_convert<bf16>(8);
}
TEST_CASE("each of the 65536 patterns of fp16 has its value, and comes back from float") {
  all_patterns_convert<fp16>(5);
}
TEST_CASE("bf16 rounds to nearest, ties to even, between all its neighbours") {
  all_roundings_are_to_nearest_even<bf16>(8);
}
TEST_CASE("fp16 rounds to nearest, ties to even, between all its neighbours, subnormals included") {
  all_roundings_are_to_nearest_even<fp16>(5);
}

#if defined(__FLT16_MAX__) && defined(__F16C__)
TEST_CASE("fp16 agrees with the compiler's _Float16 on every 251st float") {
  int wrong = 0;
  for (std::uint64_t bits = 0; bits < std::uint64_t{1} << 32; bits += 251) {
    auto const x = std::bit_cast<float>(static_cast<std::uint32_t>(bits));
    auto const theirs = static_cast<_Float16>(x);
    std::uint16_t pattern;
    std::memcpy(&pattern, &theirs, 2);
    wrong += std::isnan(x) ? !std::isnan(static_cast<float>(fp16(x))) : fp16(x).bits != pattern;
  }
  CHECK(wrong == 0);
}
#endif

TEST_CASE("overflow gives infinity, NaN stays NaN with its sign, a NaN never becomes infinity") {
  CHECK(bf16(3.4e38f).bits == 0x7f80);
  CHECK(bf16(-INFINITY).bits == 0xff80);
  CHECK(fp16(65519.9f).bits == 0x7bff);
  CHECK(fp16(65520.0f).bits == 0x7c00);
  CHECK(fp16(-1e9f).bits == 0xfc00);
  for (std::uint32_t payload : {1u, 0x3fffffu, 0x400000u, 0x7fffffu, 0x1000u})
    for (std::uint32_t sign : {0u, 0x80000000u}) {
      auto const nan = std::bit_cast<float>(sign | 0x7f800000u | payload);
      CHECK(std::isnan(static_cast<float>(bf16(nan))));
      CHECK(std::isnan(static_cast<float>(fp16(nan))));
      CHECK((bf16(nan).bits & 0x8000u) == sign >> 16);
      CHECK((fp16(nan).bits & 0x8000u) == sign >> 16);
    }
}

TEST_CASE("conversions are constant expressions; store rounds as the conversion does") {
  static_assert(bf16(1.0f).bits == 0x3f80);
  static_assert(static_cast<float>(fp16::from_bits(0x0001)) == 0x1p-24f);
  static_assert(fp16(0x1p-25f).bits == 0 && fp16(0x1.8p-24f).bits == 2);
  bf16 b;
  fp16 h;
  float f = 0;
  tessera::store(b, 1.00390625f);
  tessera::store(h, 1.00048828125f);
  tessera::store(f, 0.1f);
  CHECK(b.bits == bf16(1.00390625f).bits);
  CHECK(h.bits == fp16(1.00048828125f).bits);
  CHECK(f == 0.1f);
}

TEST_CASE("types are called by their field's names") {
  using tessera::scalar_name;
  CHECK(scalar_name<float>() == "fp32");
  CHECK(scalar_name<bf16>() == "bf16");
  CHECK(scalar_name<fp16>() == "fp16");
  CHECK(scalar_name<double>() == "fp64");
  CHECK(scalar_name<std::int32_t>() == "int32");
  CHECK(scalar_name<std::uint16_t>() == "uint16");
  CHECK(scalar_name<std::int64_t>() == "int64");
  CHECK(scalar_name<unsigned char>() == "uint8");
  CHECK(scalar_name<std::byte>() == "bytes");
  static_assert(tessera::storage_scalar<bf16> && !tessera::storage_scalar<double>);
}
