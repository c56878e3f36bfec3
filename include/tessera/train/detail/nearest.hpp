/// Which of several names a misspelt one was probably meant to be.
#ifndef TESSERA_TRAIN_DETAIL_NEAREST_HPP
#define TESSERA_TRAIN_DETAIL_NEAREST_HPP

#include <algorithm>
#include <numeric>
#include <span>
#include <string_view>
#include <vector>

#include <tessera/core/abi.hpp>

namespace tessera::inline TESSERA_ABI::train::detail {

/// Insertions, deletions and substitutions that turn `a` into `b` (Levenshtein, one row at a time).
inline std::size_t edit_distance(std::string_view a, std::string_view b) {
  std::vector<std::size_t> row(b.size() + 1);
  std::iota(row.begin(), row.end(), std::size_t{0});
  for (std::size_t i = 0; i < a.size(); ++i) {
    auto diagonal = row[0];
    row[0] = i + 1;
    for (std::size_t j = 0; j < b.size(); ++j) {
      auto const substituted = diagonal + (a[i] == b[j] ? 0 : 1);
      diagonal = row[j + 1];
      row[j + 1] = (std::min)({substituted, row[j] + 1, row[j + 1] + 1});
    }
  }
  return row[b.size()];
}

/// The candidate with the smallest edit distance; empty if there are none.
inline std::string_view nearest(std::string_view name, std::span<std::string_view const> candidates) {
  auto const best = std::min_element(candidates.begin(), candidates.end(), [&](auto a, auto b) {
    return edit_distance(name, a) < edit_distance(name, b);
  });
  return best == candidates.end() ? std::string_view{} : *best;
}

} // namespace tessera::inline TESSERA_ABI::train::detail

#endif
