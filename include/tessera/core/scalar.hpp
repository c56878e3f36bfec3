/// The element types of tensors: float, and the 16-bit storage types `bf16` and `fp16`. The 16-bit types
/// store only: they convert to and from float (round to nearest, ties to even; NaN stays NaN; overflow gives
/// infinity) and all arithmetic is done in float. A device converts by its own instructions: the same
/// results, but for the payload of a NaN.
#ifndef TESSERA_CORE_SCALAR_HPP
#define TESSERA_CORE_SCALAR_HPP

#include <bit>
#include <concepts>
#include <cstdint>
#include <string_view>
#include <type_traits>

#include <tessera/core/abi.hpp>

namespace tessera::inline TESSERA_STABLE_ABI {

namespace detail {
/// `condition ? yes : no` by a mask. A conditional expression may come back as a branch, and a loop that
/// converts storage would no longer be vectorised. (Its conditions compare as signed integers: vector units
/// have no unsigned comparison.)
[[gnu::always_inline]] TESSERA_HOST_DEVICE constexpr std::uint32_t select(bool condition, std::uint32_t yes,
                                                                          std::uint32_t no) noexcept {
#if defined(__CUDA_ARCH__)
  return condition ? yes : no;
#else
  auto const mask = 0u - static_cast<std::uint32_t>(condition);
  return (yes & mask) | (no & ~mask);
#endif
}
} // namespace detail

/// Brain floating point: 1 sign, 8 exponent and 7 mantissa bits; the upper half of a float.
struct bf16 {
  std::uint16_t bits;

  bf16() = default;
  [[gnu::always_inline]] TESSERA_HOST_DEVICE constexpr explicit bf16(float value) noexcept {
#if defined(__CUDA_ARCH__)
    if (!std::is_constant_evaluated()) {
      asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(bits) : "f"(value));
      return;
    }
#endif
    auto const word = std::bit_cast<std::uint32_t>(value);
    auto const is_nan = static_cast<std::int32_t>(word & 0x7fffffffu) > 0x7f800000;
    auto const rounded = word + detail::select(is_nan, 0u, 0x7fffu + ((word >> 16) & 1u));
    auto const quiet = rounded | detail::select(is_nan, 0x400000u, 0u);
    // The sign stays one: what vector units pack into 16 bits is signed.
    bits = static_cast<std::uint16_t>(static_cast<std::int32_t>(quiet) >> 16);
  }
  [[gnu::always_inline]] TESSERA_HOST_DEVICE constexpr operator float() const noexcept {
    return std::bit_cast<float>(static_cast<std::uint32_t>(bits) << 16);
  }
  static TESSERA_HOST_DEVICE constexpr bf16 from_bits(std::uint16_t bits) noexcept {
    bf16 value{};
    value.bits = bits;
    return value;
  }
};

/// IEEE 754 binary16: 1 sign, 5 exponent and 10 mantissa bits, with subnormals.
struct fp16 {
  std::uint16_t bits;

  fp16() = default;
  [[gnu::always_inline]] TESSERA_HOST_DEVICE constexpr explicit fp16(float value) noexcept {
#if defined(__CUDA_ARCH__)
    if (!std::is_constant_evaluated()) {
      asm("cvt.rn.f16.f32 %0, %1;" : "=h"(bits) : "f"(value));
      return;
    }
#endif
    auto const word = std::bit_cast<std::uint32_t>(value);
    auto const magnitude = word & 0x7fffffffu;
    // Normal: the exponent is rebiased by 127 - 15, thirteen bits of the mantissa are rounded off.
    auto result = (magnitude - 0x38000000u + 0xfffu + ((magnitude >> 13) & 1u)) >> 13;
    // Subnormal: adding 1/2 makes the unit in the last place 2^-24, so the sum holds the rounded mantissa.
    auto const size = static_cast<std::int32_t>(magnitude);
    auto const is_subnormal = size < 0x38800000;
    auto const tiny = std::bit_cast<float>(detail::select(is_subnormal, magnitude, 0u));
    auto const sum = std::bit_cast<std::uint32_t>(tiny + 0.5f);
    result = detail::select(is_subnormal, sum - 0x3f000000u, result);
    result = detail::select(size >= 0x477ff000, 0x7c00u, result); // 65520 and above round to infinity
    result = detail::select(size > 0x7f800000, 0x7e00u | ((magnitude >> 13) & 0x3ffu), result);
    bits = static_cast<std::uint16_t>(result | ((word >> 16) & 0x8000u));
  }
  [[gnu::always_inline]] TESSERA_HOST_DEVICE constexpr operator float() const noexcept {
#if defined(__CUDA_ARCH__)
    if (!std::is_constant_evaluated()) {
      float value;
      asm("cvt.f32.f16 %0, %1;" : "=f"(value) : "h"(bits));
      return value;
    }
#endif
    auto const magnitude = static_cast<std::uint32_t>(bits) & 0x7fffu;
    auto const size = static_cast<std::int32_t>(magnitude);
    auto const subnormal = std::bit_cast<std::uint32_t>(static_cast<float>(size) * 0x1p-24f);
    auto result = detail::select(size < 0x400, subnormal, (magnitude << 13) + (112u << 23));
    result = detail::select(size >= 0x7c00, (magnitude << 13) | 0x7f800000u, result);
    return std::bit_cast<float>(result | (static_cast<std::uint32_t>(bits & 0x8000u) << 16));
  }
  static TESSERA_HOST_DEVICE constexpr fp16 from_bits(std::uint16_t bits) noexcept {
    fp16 value{};
    value.bits = bits;
    return value;
  }
};

/// What weights, activations and gradients are stored in.
template <class T>
concept storage_scalar = std::same_as<T, float> || std::same_as<T, bf16> || std::same_as<T, fp16>;

/// place = T(value), rounded. In a loop marked TESSERA_SIMD write this, not the assignment: there g++ keeps
/// the temporary of a 16-bit type in memory, one for each lane, and does not vectorise.
template <storage_scalar T>
[[gnu::always_inline]] TESSERA_HOST_DEVICE constexpr void store(T& place, float value) noexcept {
  place = T(value);
}

/// The field's name of a scalar type: "fp32", "bf16", "fp16", "fp64", "int32", "uint16" ...
template <class T>
constexpr std::string_view scalar_name() noexcept {
  if constexpr (std::same_as<T, float>)
    return "fp32";
  else if constexpr (std::same_as<T, bf16>)
    return "bf16";
  else if constexpr (std::same_as<T, fp16>)
    return "fp16";
  else if constexpr (std::same_as<T, double>)
    return "fp64";
  else if constexpr (std::integral<T>) {
    constexpr bool is_signed = std::signed_integral<T>;
    if constexpr (sizeof(T) == 1)
      return is_signed ? "int8" : "uint8";
    else if constexpr (sizeof(T) == 2)
      return is_signed ? "int16" : "uint16";
    else if constexpr (sizeof(T) == 4)
      return is_signed ? "int32" : "uint32";
    else
      return is_signed ? "int64" : "uint64";
  } else
    return "bytes";
}

} // namespace tessera::inline TESSERA_STABLE_ABI

#endif
