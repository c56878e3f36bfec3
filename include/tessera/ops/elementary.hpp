/// exp, log, tanh, erf and sigmoid of a float, without branches, tables or calls, so that a loop over them
/// turns into vector instructions on any compiler. Within 1.5 units in the last place of the true value
/// (sigmoid 2.5; tests/ops/elementary.cpp measures it), right at the infinities, at NaN, and where results
/// overflow or become subnormal. In device code exp, log, tanh and erf are CUDA's own, within 2 units.
/// There sigmoid stands on the hardware's exponential: within 4 units for positive numbers, and within a
/// relative 1e-5 for negative ones, whose results below 2^-126 become 0.
///
///     for (index_t i = 0; i < n; ++i) out[i] = elementary::exp(in[i]);
///
/// The polynomials are minimax fits (Remez) of this library's own making.
#ifndef TESSERA_OPS_ELEMENTARY_HPP
#define TESSERA_OPS_ELEMENTARY_HPP

#include <bit>
#include <cstdint>

#include <tessera/core/abi.hpp>

namespace tessera::inline TESSERA_ABI::ops::elementary {

/// `condition ? yes : no` where both are at hand, by a mask: compilers turn a conditional expression back
/// into a branch, which ends vectorisation.
[[gnu::always_inline]] TESSERA_HOST_DEVICE inline float select(bool condition, float yes, float no) noexcept {
#if defined(__CUDA_ARCH__)
  return condition ? yes : no;
#else
  auto const mask = 0u - static_cast<std::uint32_t>(condition);
  return std::bit_cast<float>((std::bit_cast<std::uint32_t>(yes) & mask) |
                              (std::bit_cast<std::uint32_t>(no) & ~mask));
#endif
}

[[gnu::always_inline]] TESSERA_HOST_DEVICE inline float magnitude(float x) noexcept {
  return std::bit_cast<float>(std::bit_cast<std::uint32_t>(x) & 0x7fffffffu);
}

/// |x| with the sign of `sign`.
[[gnu::always_inline]] TESSERA_HOST_DEVICE inline float with_sign_of(float x, float sign) noexcept {
  return std::bit_cast<float>((std::bit_cast<std::uint32_t>(x) & 0x7fffffffu) |
                              (std::bit_cast<std::uint32_t>(sign) & 0x80000000u));
}

/// The larger one; the first if either is NaN.
[[gnu::always_inline]] TESSERA_HOST_DEVICE inline float larger(float a, float b) noexcept {
  return select(b > a, b, a);
}
/// The smaller one; the first if either is NaN.
[[gnu::always_inline]] TESSERA_HOST_DEVICE inline float smaller(float a, float b) noexcept {
  return select(b < a, b, a);
}

/// e^x.
[[gnu::always_inline]] TESSERA_HOST_DEVICE inline float exp(float x) noexcept {
#if defined(__CUDA_ARCH__)
  return ::expf(x);
#else
  // Beyond these bounds the result is 0 or infinity anyway; the order of the arguments keeps NaN.
  x = smaller(larger(x, -104.0f), 89.0f);
  // x = n log 2 + r with |r| <= log(2) / 2. Adding 1.5 * 2^23 rounds to an integer and leaves it in the low
  // bits; log 2 is cut in two so that n times its upper part is exact.
  constexpr float shift = 12582912.0f;
  auto const shifted = x * 1.44269504f + shift;
  auto const whole = shifted - shift;
  auto const n = std::bit_cast<std::int32_t>(shifted) - std::bit_cast<std::int32_t>(shift);
  auto const r = (x - whole * 0x1.62e4p-1f) - whole * 0x1.7f7d1cp-20f;
  auto p = 0x1.6a1a72p-10f;
  p = p * r + 0x1.123fc6p-7f;
  p = p * r + 0x1.555916p-5f;
  p = p * r + 0x1.55548ap-3f;
  p = p * r + 0x1.fffffcp-2f;
  p = p * (r * r) + r + 1.0f;
  // 2^n in two factors: n may lie outside the exponents of normal numbers, its halves do not.
  auto const half = n >> 1;
  auto const low = std::bit_cast<float>(static_cast<std::uint32_t>(half + 127) << 23);
  auto const high = std::bit_cast<float>(static_cast<std::uint32_t>(n - half + 127) << 23);
  return p * low * high;
#endif
}

/// Natural logarithm: minus infinity at 0, NaN below it.
[[gnu::always_inline]] TESSERA_HOST_DEVICE inline float log(float x) noexcept {
#if defined(__CUDA_ARCH__)
  return ::logf(x);
#else
  // x = m 2^e with m in [sqrt(1/2), sqrt(2)), subnormals scaled up first.
  auto const tiny = x < 0x1p-126f;
  auto const scaled = x * select(tiny, 0x1p25f, 1.0f);
  // Unsigned: the bits of a negative x wrap round here, and its result is NaN below.
  auto const offset = static_cast<std::int32_t>(std::bit_cast<std::uint32_t>(scaled) - 0x3f3504f3u);
  auto const e = static_cast<float>(offset >> 23) - select(tiny, 25.0f, 0.0f);
  auto const m = std::bit_cast<float>((offset & 0x7fffff) + 0x3f3504f3);
  auto const f = m - 1.0f;
  auto p = 0x1.1457bap-4f;
  p = p * f - 0x1.de3c1ap-4f;
  p = p * f + 0x1.e6f064p-4f;
  p = p * f - 0x1.fc2206p-4f;
  p = p * f + 0x1.233768p-3f;
  p = p * f - 0x1.555c4ep-3f;
  p = p * f + 0x1.99a4b6p-3f;
  p = p * f - 0x1.000006p-2f;
  p = p * f + 0x1.555548p-2f;
  auto const square = f * f;
  auto const tail = p * f * square - 0.5f * square + e * 0x1.7f7d1cp-20f;
  auto result = f + tail + e * 0x1.62e4p-1f;
  constexpr auto infinity = std::bit_cast<float>(0x7f800000u);
  constexpr auto not_a_number = std::bit_cast<float>(0x7fc00000u);
  result = select(x == 0.0f, -infinity, result);
  result = select(x == infinity, infinity, result);
  return select(x >= 0.0f, result, not_a_number);
#endif
}

/// Hyperbolic tangent.
[[gnu::always_inline]] TESSERA_HOST_DEVICE inline float tanh(float x) noexcept {
#if defined(__CUDA_ARCH__)
  return ::tanhf(x);
#else
  auto const a = magnitude(x);
  // Near zero an odd polynomial, further out 1 - 2 / (e^2|x| + 1): the latter cancels near zero.
  auto const z = a * a;
  auto p = 0x1.0e9ebep-9f;
  p = p * z - 0x1.09286p-7f;
  p = p * z + 0x1.62fb4p-6f;
  p = p * z - 0x1.b9e19p-5f;
  p = p * z + 0x1.111026p-3f;
  p = p * z - 0x1.555552p-2f;
  auto const near = a + a * (p * z);
  auto const far = 1.0f - 2.0f / (exp(a + a) + 1.0f);
  return with_sign_of(select(a < 0.625f, near, far), x);
#endif
}

/// The error function.
[[gnu::always_inline]] TESSERA_HOST_DEVICE inline float erf(float x) noexcept {
#if defined(__CUDA_ARCH__)
  return ::erff(x);
#else
  auto const a = magnitude(x);
  // Near zero an odd polynomial, further out 1 - exp(log erfc|x|) with a polynomial for the logarithm.
  auto const z = a * a;
  auto p = 0x1.574ecep-14f;
  p = p * z - 0x1.a88d8ap-11f;
  p = p * z + 0x1.549664p-8f;
  p = p * z - 0x1.b80962p-6f;
  p = p * z + 0x1.ce2dcap-4f;
  p = p * z - 0x1.812742p-2f;
  p = p * z + 0x1.06eba8p-3f; // 2 / sqrt(pi) - 1
  auto const near = a + a * p;
  auto const b = smaller(a, 4.0f); // erf(4) rounds to 1
  auto q = -0x1.5d71d4p-16f;
  q = q * b + 0x1.c4590cp-12f;
  q = q * b - 0x1.10624ep-8f;
  q = q * b + 0x1.9aebaep-6f;
  q = q * b - 0x1.bb4548p-4f;
  q = q * b - 0x1.444d1ep-1f;
  q = q * b - 0x1.212626p+0f;
  q = q * b + 0x1.62d89ap-13f;
  auto const far = 1.0f - exp(q);
  return with_sign_of(select(a < 0.921875f, near, far), x);
#endif
}

/// 1 / (1 + e^-x), accurate down to its subnormal results.
[[gnu::always_inline]] TESSERA_HOST_DEVICE inline float sigmoid(float x) noexcept {
#if defined(__CUDA_ARCH__)
  // On 16-bit storage the kernels that call this have some 25 instructions an element before memory is no
  // longer what they wait for; this takes a third of what the exact exponential does.
  float e;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(e) : "f"(magnitude(x) * -1.44269504f));
  return __fdividef(select(x < 0.0f, e, 1.0f), 1.0f + e);
#else
  auto const e = exp(-magnitude(x));
  return select(x < 0.0f, e, 1.0f) / (1.0f + e);
#endif
}

} // namespace tessera::inline TESSERA_ABI::ops::elementary

#endif
