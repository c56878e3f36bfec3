/// How n elements are cut into contiguous parts: uneven and empty parts are ordinary.
#ifndef TESSERA_LAYOUT_SHARD_HPP
#define TESSERA_LAYOUT_SHARD_HPP

#include <tessera/core/extents.hpp>

namespace tessera::inline TESSERA_ABI::layout {

/// The half-open range [begin, end).
struct range {
  index_t begin = 0;
  index_t end = 0;

  constexpr index_t size() const noexcept { return end - begin; }
  constexpr bool empty() const noexcept { return begin == end; }
  friend constexpr bool operator==(range const&, range const&) = default;
};

/// What two ranges share; empty (at some position) where they share nothing.
constexpr range intersection(range a, range b) noexcept {
  auto const begin = a.begin > b.begin ? a.begin : b.begin;
  auto const end = a.end < b.end ? a.end : b.end;
  return {begin, end < begin ? begin : end};
}

/// Part `part` of `parts` of n elements. Postconditions: the parts are in order, disjoint and cover [0, n);
/// every inner border is a multiple of `granule`; whole granules are spread so that the parts' counts of them
/// differ by at most one, the earlier parts taking more.
constexpr range shard_of(index_t n, index_t parts, index_t part, index_t granule = 1,
                         site where = site::here()) {
  if (n < 0 || parts < 1 || part < 0 || part >= parts || granule < 1)
    throw size_error("E-layout-001", where, "shard ", part, " of ", parts, " of ", n,
                     " elements in granules of ", granule, " does not exist");
  auto const granules = n / granule + (n % granule != 0 ? 1 : 0);
  auto const border = [&](index_t p) {
    auto const before = granules / parts * p + (p < granules % parts ? p : granules % parts);
    return before <= n / granule ? before * granule : n; // compared first: the product may pass 2^63 - 1
  };
  return {border(part), border(part + 1)};
}

} // namespace tessera::inline TESSERA_ABI::layout

#endif
