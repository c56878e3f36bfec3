/// Which of some names a mistyped one was probably meant to be.
#ifndef TESSERA_IO_DETAIL_NEAREST_HPP
#define TESSERA_IO_DETAIL_NEAREST_HPP

#include <algorithm>
#include <string>
#include <string_view>
#include <vector>

#include <tessera/core/abi.hpp>

namespace tessera::inline TESSERA_ABI::io::detail {

/// How many letters must be put in, taken out or exchanged to make `a` into `b` (Levenshtein's distance).
inline std::size_t edit_distance(std::string_view a, std::string_view b) {
  std::vector<std::size_t> row(b.size() + 1);
  for (std::size_t j = 0; j <= b.size(); ++j) row[j] = j;
  for (std::size_t i = 1; i <= a.size(); ++i) {
    auto diagonal = row[0];
    row[0] = i;
    for (std::size_t j = 1; j <= b.size(); ++j) {
      auto const above = row[j];
      row[j] = (std::min)({above + 1, row[j - 1] + 1, diagonal + (a[i - 1] == b[j - 1] ? 0u : 1u)});
      diagonal = above;
    }
  }
  return row[b.size()];
}

/// The nearest of `names`, the first of equally near ones; "" if there are none.
inline std::string nearest(std::string_view typed, std::vector<std::string> const& names) {
  std::string best;
  auto least = static_cast<std::size_t>(-1);
  for (auto const& name : names) {
    auto const distance = edit_distance(typed, name);
    if (distance < least) {
      least = distance;
      best = name;
    }
  }
  return best;
}

} // namespace tessera::inline TESSERA_ABI::io::detail

#endif
