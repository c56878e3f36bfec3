#ifndef TESSERA_OPTIM_DETAIL_SQUARE_ROOT_HPP
#define TESSERA_OPTIM_DETAIL_SQUARE_ROOT_HPP

#include <bit>
#include <cstdint>

#include <tessera/core/abi.hpp>

namespace tessera::inline TESSERA_ABI::optim::detail {

/// The square root of x >= 0 to one unit in the last place, without a branch or a call, so that a loop over
/// it is vectorised. (std::sqrt sets errno, which forbids that unless a program is compiled with
/// -fno-math-errno.) Infinity and NaN are their own roots.
///
/// A guess at 1 / sqrt(x) from the bits (half the exponent, negated), two Newton steps on it, and one on
/// the root itself. Below 2^-96 the argument is scaled by 2^64, which brings subnormals to where the guess
/// holds. Choices are made by masks: a conditional expression would come back as a branch.
[[gnu::always_inline]] TESSERA_HOST_DEVICE constexpr float square_root(float x) noexcept {
  auto const bits = std::bit_cast<std::uint32_t>(x);
  auto const tiny = 0u - static_cast<std::uint32_t>(bits < (31u << 23)); // 2^-96
  auto const scaled = x * std::bit_cast<float>((127u << 23) + (tiny & (64u << 23)));
  auto inverse = std::bit_cast<float>(0x5f375a86u - (std::bit_cast<std::uint32_t>(scaled) >> 1));
  auto const half = 0.5f * scaled;
  inverse *= 1.5f - half * inverse * inverse;
  inverse *= 1.5f - half * inverse * inverse;
  auto root = scaled * inverse;
  root += 0.5f * inverse * (scaled - root * root);
  root *= std::bit_cast<float>((127u << 23) - (tiny & (32u << 23)));
  auto const finite = 0u - static_cast<std::uint32_t>(bits < (255u << 23));
  return std::bit_cast<float>((std::bit_cast<std::uint32_t>(root) & finite) | (bits & ~finite));
}

} // namespace tessera::inline TESSERA_ABI::optim::detail

#endif
