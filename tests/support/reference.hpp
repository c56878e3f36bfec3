/// What the tests of operations share: inputs drawn by Philox, double-precision copies, and comparisons that
/// name the first bad element.
#ifndef TESSERA_TESTS_SUPPORT_REFERENCE_HPP
#define TESSERA_TESTS_SUPPORT_REFERENCE_HPP

#include <cmath>
#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include <tessera/core/philox.hpp>
#include <tessera/core/scalar.hpp>
#include <tessera/core/tensor.hpp>

namespace reference {

using tessera::index_t;

/// As many threads as wanted where the build has OpenMP, else one.
constexpr int threads([[maybe_unused]] int wanted) {
#if defined(_OPENMP)
  return wanted;
#else
  return 1;
#endif
}

/// Normal numbers times `scale`, rounded to T: the same for the same seed.
template <class T>
void fill_normal(std::span<T> out, std::uint64_t seed, float scale = 1.0f) {
  tessera::philox const random(seed);
  for (std::size_t i = 0; i < out.size(); ++i) out[i] = T(random.normal(i) * scale);
}

/// A contiguous tensor of normal numbers.
template <class T, int Rank>
tessera::tensor<T, Rank> normal(tessera::extents<Rank> const& sizes, std::uint64_t seed, float scale = 1.0f) {
  tessera::tensor<T, Rank> out(sizes);
  fill_normal(out.span(), seed, scale);
  return out;
}

/// Integers in [0, bound).
inline tessera::tensor<std::int32_t, 1> integers(index_t count, std::int32_t bound, std::uint64_t seed) {
  tessera::tensor<std::int32_t, 1> out({count});
  tessera::philox const random(seed);
  for (index_t i = 0; i < count; ++i)
    out(i) = static_cast<std::int32_t>(random.bits(static_cast<std::uint64_t>(i)) %
                                       static_cast<std::uint32_t>(bound));
  return out;
}

/// The elements as doubles, in row-major order.
template <class T>
std::vector<double> doubles(std::span<T> values) {
  std::vector<double> out;
  out.reserve(values.size());
  for (auto value : values) out.push_back(static_cast<double>(static_cast<float>(value)));
  return out;
}

/// The largest |actual - expected| over the largest |expected| (over 1e-30 where all are zero); infinite
/// where counts differ or a value is not finite.
template <class A>
double max_relative_error(std::span<A> actual, std::vector<double> const& expected) {
  if (actual.size() != expected.size()) return INFINITY;
  double scale = 1e-30, worst = 0;
  for (auto value : expected) scale = std::fmax(scale, std::fabs(value));
  for (std::size_t i = 0; i < expected.size(); ++i) {
    auto const difference = std::fabs(static_cast<double>(static_cast<float>(actual[i])) - expected[i]);
    if (!(difference <= worst)) worst = difference == difference ? difference : INFINITY;
  }
  return worst / scale;
}
template <class A, int Rank>
double max_relative_error(tessera::tensor<A, Rank> const& actual, std::vector<double> const& expected) {
  return max_relative_error(actual.span(), expected);
}

/// The tolerance of a storage type against float64: rounding of fp32 sums, or of one 16-bit store.
template <class T>
constexpr double tolerance() {
  return sizeof(T) == 4 ? 1e-5 : 1e-2;
}

/// The central difference of a scalar function of one float, which is left as it was. The step taken is the
/// one that the float can represent.
template <class F>
double central_difference(float& at, float step, F&& function) {
  auto const held = at;
  at = held + step;
  auto const up = static_cast<double>(at), above = static_cast<double>(function());
  at = held - step;
  auto const down = static_cast<double>(at), below = static_cast<double>(function());
  at = held;
  return (above - below) / (up - down);
}

} // namespace reference

#endif
