/// What the pictures share: text that is safe inside SVG, printed numbers, round distances between ticks.
#ifndef TESSERA_TRAIN_DETAIL_SVG_HPP
#define TESSERA_TRAIN_DETAIL_SVG_HPP

#include <cmath>
#include <cstdio>
#include <string>
#include <string_view>

#include <tessera/core/extents.hpp>

namespace tessera::inline TESSERA_ABI::train::detail {

/// A step of 1, 2 or 5 times a power of ten that cuts `length` into about `wanted` parts.
inline double tick_step(double length, int wanted) {
  auto const rough = length / wanted;
  auto const power = std::pow(10.0, std::floor(std::log10(rough)));
  auto const digit = rough / power;
  return power * (digit < 1.5 ? 1 : digit < 3.5 ? 2 : digit < 7.5 ? 5 : 10);
}

inline std::string escaped(std::string_view text) {
  std::string safe;
  for (char c : text) {
    if (c == '<')
      safe += "&lt;";
    else if (c == '>')
      safe += "&gt;";
    else if (c == '&')
      safe += "&amp;";
    else if (c == '"')
      safe += "&quot;";
    else if (static_cast<unsigned char>(c) >= 0x20)
      safe += c;
  }
  return safe;
}

template <class... Numbers>
std::string formatted(char const* form, Numbers... numbers) {
  char text[512];
  std::snprintf(text, sizeof text, form, numbers...);
  return text;
}

} // namespace tessera::inline TESSERA_ABI::train::detail

#endif
