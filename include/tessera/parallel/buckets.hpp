/// Which units' gradients travel together: consecutive units, in the order in which backward finishes them,
/// until a message is worth its latency. Arithmetic alone, the same on every rank.
///
///     for (auto const& b : parallel::buckets_of(units, 1 << 20))
///       b.elements;                                  // one stretch of the gradient buffer
#ifndef TESSERA_PARALLEL_BUCKETS_HPP
#define TESSERA_PARALLEL_BUCKETS_HPP

#include <span>
#include <vector>

#include <tessera/layout/shard.hpp>

namespace tessera::inline TESSERA_ABI::parallel {

struct bucket {
  std::size_t first_unit = 0, end_unit = 0; ///< Units [first_unit, end_unit).
  layout::range elements;                   ///< Where they stand in the flat buffers.
};

/// Postconditions: the buckets run from the last unit to the first and every unit is in one of them; each has
/// at least `least_elements` elements, except the last one of the list, and would have fewer without its
/// first unit.
inline std::vector<bucket> buckets_of(std::span<layout::range const> units, index_t least_elements) {
  std::vector<bucket> buckets;
  for (auto end = units.size(); end > 0;) {
    auto first = end - 1;
    while (first > 0 && units[end - 1].end - units[first].begin < least_elements) --first;
    buckets.push_back({first, end, {units[first].begin, units[end - 1].end}});
    end = first;
  }
  return buckets;
}

} // namespace tessera::inline TESSERA_ABI::parallel

#endif
