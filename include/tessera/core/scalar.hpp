/// The element types of tensors: float, and the 16-bit storage types `bf16` and `fp16`. The 16-bit types
/// store only: they convert to and from float (round to nearest, ties to even; NaN stays NaN; overflow gives
/// infinity) and all arithmetic is done in float.
#ifndef TESSERA_CORE_SCALAR_HPP
#define TESSERA_CORE_SCALAR_HPP

#include <bit>
#include <concepts>
#include <cstdint>
#include <string_view>

#include <tessera/core/abi.hpp>

namespace tessera::inline TESSERA_STABLE_ABI {

/// Brain floating point: 1 sign, 8 exponent and 7 mantissa bits; the upper half of a float.
struct bf16 {
  std::uint16_t bits;

  bf16() = default;
  TESSERA_HOST_DEVICE constexpr explicit bf16(float value) noexcept {
    auto const word = std::bit_cast<std::uint32_t>(value);
    auto const rounded = static_cast<std::uint16_t>((word + 0x7fffu + ((word >> 16) & 1u)) >> 16);
    auto const quiet_nan = static_cast<std::uint16_t>((word >> 16) | 0x40u);
    bits = (word & 0x7fffffffu) > 0x7f800000u ? quiet_nan : rounded;
  }
  TESSERA_HOST_DEVICE constexpr operator float() const noexcept {
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
  TESSERA_HOST_DEVICE constexpr explicit fp16(float value) noexcept {
    auto const word = std::bit_cast<std::uint32_t>(value);
    auto const sign = static_cast<std::uint16_t>((word >> 16) & 0x8000u);
    auto const magnitude = word & 0x7fffffffu;
    if (magnitude > 0x7f800000u) {
      bits = static_cast<std::uint16_t>(sign | 0x7e00u | ((magnitude >> 13) & 0x3ffu));
    } else if (magnitude >= 0x477ff000u) { // 65520 and above round to infinity
      bits = static_cast<std::uint16_t>(sign | 0x7c00u);
    } else if (magnitude >= 0x38800000u) { // normal: rebias the exponent by 127 - 15
      auto const rebiased = magnitude - 0x38000000u;
      bits = static_cast<std::uint16_t>(sign | ((rebiased + 0xfffu + ((rebiased >> 13) & 1u)) >> 13));
    } else if (magnitude >= 0x33000000u) { // subnormal: shift the mantissa, with its hidden bit, into place
      auto const shift = 126u - (magnitude >> 23);
      auto const mantissa = (magnitude & 0x7fffffu) | 0x800000u;
      auto const half = 1u << (shift - 1);
      auto const odd = (mantissa >> shift) & 1u;
      bits = static_cast<std::uint16_t>(sign | ((mantissa + half - 1u + odd) >> shift));
    } else {
      bits = sign;
    }
  }
  TESSERA_HOST_DEVICE constexpr operator float() const noexcept {
    auto const sign = static_cast<std::uint32_t>(bits & 0x8000u) << 16;
    auto const exponent = static_cast<std::uint32_t>(bits >> 10) & 0x1fu;
    auto const mantissa = static_cast<std::uint32_t>(bits) & 0x3ffu;
    if (exponent == 0x1fu) return std::bit_cast<float>(sign | 0x7f800000u | (mantissa << 13));
    if (exponent != 0) return std::bit_cast<float>(sign | ((exponent + 112u) << 23) | (mantissa << 13));
    auto const magnitude = static_cast<float>(mantissa) * 0x1p-24f;
    return std::bit_cast<float>(sign | std::bit_cast<std::uint32_t>(magnitude));
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
