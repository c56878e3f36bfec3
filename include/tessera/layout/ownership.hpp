/// Which rank counts an element. Every rank that adds something up over all parameters (the global norm, a
/// parameter count), or acts once for all (initialisation under ZeRO, writing a checkpoint), asks here and
/// nowhere else, so that no element is counted twice or forgotten.
#ifndef TESSERA_LAYOUT_OWNERSHIP_HPP
#define TESSERA_LAYOUT_OWNERSHIP_HPP

#include <tessera/layout/parameters.hpp>

namespace tessera::inline TESSERA_ABI::layout {

/// A rank's place among the ranks that hold, or share, the same block.
struct ownership {
  int rank = 0;
  int ranks = 1;

  /// The elements of a flat block of `block_size` that `rank` counts. Over all ranks the ranges are disjoint
  /// and cover the block, whether the ranks hold replicas of it or shards: a shard is what its rank owns. A
  /// tied parameter is owned where its block stands; the unit that borrows it owns nothing of it.
  constexpr range of(index_t block_size) const { return of(block_size, rank); }
  constexpr range of(index_t block_size, int other_rank) const {
    return shard_of(block_size, ranks, other_rank, parameter_map::alignment);
  }
};

/// A stretch of one parameter inside a range of its block.
struct segment {
  parameter const* whole = nullptr;
  range in_block;            ///< Where it stands in the block.
  index_t first_element = 0; ///< Its first element's index within the parameter.
};

/// Cuts `part` of a block into the stretches of the parameters it covers; gaps are left out.
inline std::vector<segment> segments_of(parameter_map const& map, range part) {
  std::vector<segment> found;
  for (auto const& p : map) {
    auto const shared = intersection(p.where(), part);
    if (!shared.empty()) found.push_back({&p, shared, shared.begin - p.offset});
  }
  return found;
}

} // namespace tessera::inline TESSERA_ABI::layout

#endif
