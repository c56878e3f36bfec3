/// The cosines and sines that rotary embedding turns by, the same on every space.
#ifndef TESSERA_OPS_DETAIL_ROTARY_ANGLES_HPP
#define TESSERA_OPS_DETAIL_ROTARY_ANGLES_HPP

#include <cmath>

#include <tessera/core/extents.hpp>

namespace tessera::inline TESSERA_ABI::ops::detail {

/// For each position from 0 a row of D / 2 cosines and D / 2 sines (half = D / 2), computed in double.
inline void fill_rotary_table(float* row, float theta, index_t half, index_t positions) {
  for (index_t p = 0; p < positions; ++p, row += 2 * half)
    for (index_t i = 0; i < half; ++i) {
      auto const angle =
          static_cast<double>(p) *
          std::pow(static_cast<double>(theta), -static_cast<double>(i) / static_cast<double>(half));
      row[i] = static_cast<float>(std::cos(angle));
      row[half + i] = static_cast<float>(std::sin(angle));
    }
}

/// Turns the pair (first, second) by the angle of this cosine and sine.
[[gnu::always_inline]] TESSERA_HOST_DEVICE inline void rotate(float& first, float& second, float cosine,
                                                              float sine) noexcept {
  auto const a = first, b = second;
  first = a * cosine - b * sine;
  second = b * cosine + a * sine;
}

} // namespace tessera::inline TESSERA_ABI::ops::detail

#endif
