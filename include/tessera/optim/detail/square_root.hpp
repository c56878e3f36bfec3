/// A square root that loops can be vectorised over.
#ifndef TESSERA_OPTIM_DETAIL_SQUARE_ROOT_HPP
#define TESSERA_OPTIM_DETAIL_SQUARE_ROOT_HPP

#include <bit>
#include <cstdint>

#include <tessera/core/abi.hpp>

namespace tessera::inline TESSERA_ABI::optim::detail {

/// The square root of x >= 0 to one unit in the last place, without a branch or a call, so that a loop over
/// it is vectorised. (std::sqrt sets errno, which forbids that unless a program is compiled with
/// -fno-math-errno.) Infinity and NaN are their own roots. The root of a subnormal number (below 2^-126) may
/// come out too small; it is below 2^-63 in any case, far below any epsilon that it is added to.
///
/// A guess at 1 / sqrt(x) from the bits (half the exponent, negated), two Newton steps on it, and one on the
/// root itself. The last choice is made by a mask: a conditional expression would come back as a branch.
[[gnu::always_inline]] TESSERA_HOST_DEVICE constexpr float square_root(float x) noexcept {
  auto const bits = std::bit_cast<std::int32_t>(x);
  auto inverse = std::bit_cast<float>(0x5f375a86 - (bits >> 1));
  auto const half = 0.5f * x;
  inverse *= 1.5f - half * inverse * inverse;
  inverse *= 1.5f - half * inverse * inverse;
  auto root = x * inverse;
  root += 0.5f * inverse * (x - root * root);
  auto const finite = -static_cast<std::int32_t>(bits < 0x7f800000);
  return std::bit_cast<float>((std::bit_cast<std::int32_t>(root) & finite) | (bits & ~finite));
}

} // namespace tessera::inline TESSERA_ABI::optim::detail

#endif
