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
  /// 0: the ranks' parts are as even as they go. Otherwise a block is cut into this many pieces first, the
  /// same for any number of ranks, and each rank counts a run of them: what is added up piece by piece can
  /// then be added up in one order, whoever has which piece.
  int pieces = 0;

  /// The elements of a flat block of `block_size` that `rank` counts. Over all ranks the ranges are disjoint
  /// and cover the block, whether the ranks hold replicas of it or shards: a shard is what its rank owns. A
  /// tied parameter is owned where its block stands; the unit that borrows it owns nothing of it.
  constexpr range of(index_t block_size) const { return of(block_size, rank); }
  constexpr range of(index_t block_size, int other_rank) const {
    if (pieces == 0) return shard_of(block_size, ranks, other_rank, parameter_map::alignment);
    auto const run = pieces_of(other_rank);
    auto const border = [&](index_t i) { return i == pieces ? block_size : piece(block_size, i).begin; };
    return {border(run.begin), border(run.end)};
  }

  /// How many elements each rank counts: what the `_v` collectives are told. Allocates nothing where `counts`
  /// has had as many before.
  void counts_of(index_t block_size, std::vector<index_t>& counts) const {
    counts.resize(static_cast<std::size_t>(ranks));
    for (int r = 0; r < ranks; ++r) counts[static_cast<std::size_t>(r)] = of(block_size, r).size();
  }

  /// Which of the pieces a rank counts, and where one of them stands.
  constexpr range pieces_of(int other_rank) const { return shard_of(pieces, ranks, other_rank); }
  constexpr range piece(index_t block_size, index_t number) const {
    return shard_of(block_size, pieces, number, parameter_map::alignment);
  }
};

/// Whether rank `tensor_rank` of a tensor-parallel group counts a parameter that it holds: of the ranks that
/// hold the same elements, the first.
constexpr bool counts(parameter const& p, int tensor_rank) noexcept {
  return tensor_rank % p.share.copies == 0;
}

/// A stretch of one parameter inside a range of its block.
struct segment {
  parameter const* whole = nullptr;
  range in_block;            ///< Where it stands in the block.
  index_t first_element = 0; ///< Its first element's index within the whole parameter, of all ranks.
};

/// Cuts `part` of a block into the stretches of the parameters it covers; gaps are left out. Each stretch is
/// adjacent in the whole parameter too, whatever this rank's share of that is.
inline std::vector<segment> segments_of(parameter_map const& map, range part) {
  std::vector<segment> found;
  for (auto const& p : map) {
    if (intersection(p.where(), part).empty()) continue;
    for (auto const& r : p.runs()) {
      auto const shared = intersection({p.offset + r.here.begin, p.offset + r.here.end}, part);
      if (!shared.empty())
        found.push_back({&p, shared, r.in_whole + (shared.begin - p.offset - r.here.begin)});
    }
  }
  return found;
}

/// The stretches of `part` of a block that rank `tensor_rank` of a tensor-parallel group counts, in order.
inline std::vector<range> counted_ranges(parameter_map const& map, range part, int tensor_rank) {
  std::vector<range> found;
  for (auto const& p : map) {
    auto const shared = intersection(p.where(), part);
    if (shared.empty() || !counts(p, tensor_rank)) continue;
    if (!found.empty() && found.back().end == shared.begin)
      found.back().end = shared.end;
    else
      found.push_back(shared);
  }
  return found;
}

} // namespace tessera::inline TESSERA_ABI::layout

#endif
