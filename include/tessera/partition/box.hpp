/// Which elements of a whole tensor a rank holds: a box of them, one range a dimension.
///
///     auto const mine = local_box(extents<2>{rows, width}, parts, shape, shape.coordinates(rank));
///     mine.begin[0];      // the first of this rank's rows in the whole
#ifndef TESSERA_PARTITION_BOX_HPP
#define TESSERA_PARTITION_BOX_HPP

#include <tessera/layout/shard.hpp>
#include <tessera/partition/placements.hpp>

namespace tessera::inline TESSERA_ABI::partition {

/// Elements [begin[d], begin[d] + sizes[d]) of each dimension.
template <int Rank>
struct box {
  extents<Rank> begin{};
  extents<Rank> sizes{};

  constexpr index_t size() const noexcept {
    index_t count = 1;
    for (auto each : sizes) count *= each;
    return count;
  }
  constexpr layout::range range(int d) const noexcept {
    auto const i = static_cast<std::size_t>(d);
    return {begin[i], begin[i] + sizes[i]};
  }
  friend constexpr bool operator==(box const&, box const&) = default;
};

/// The elements that both have.
template <int Rank>
constexpr box<Rank> intersection(box<Rank> const& a, box<Rank> const& b) noexcept {
  box<Rank> shared;
  for (int d = 0; d < Rank; ++d) {
    auto const r = intersection(a.range(d), b.range(d));
    shared.begin[static_cast<std::size_t>(d)] = r.begin;
    shared.sizes[static_cast<std::size_t>(d)] = r.size();
  }
  return shared;
}

/// The part of dimension `d`, of `n` elements in the whole, of the rank at `where`.
constexpr layout::range local_range(index_t n, int d, partitioning const& parts,
                                    layout::mesh_shape const& shape, layout::mesh_coordinates const& where) {
  layout::range mine{0, n};
  for (int i = 0; i < parts.size; ++i)
    if (parts.at[i].cuts(d)) {
      auto const part =
          layout::shard_of(mine.size(), shape.size(parts.axes[i]), where[parts.axes[i]], parts.at[i].granule);
      mine = {mine.begin + part.begin, mine.begin + part.end};
    }
  return mine;
}

/// What the rank at `where` of the mesh holds. Over the ranks along the cut axes the boxes are disjoint and
/// cover the whole.
template <std::size_t Rank>
constexpr box<narrow<int>(Rank)> local_box(std::array<index_t, Rank> const& whole, partitioning const& parts,
                                           layout::mesh_shape const& shape,
                                           layout::mesh_coordinates const& where) {
  box<narrow<int>(Rank)> mine;
  for (std::size_t d = 0; d < Rank; ++d) {
    auto const r = local_range(whole[d], narrow<int>(d), parts, shape, where);
    mine.begin[d] = r.begin;
    mine.sizes[d] = r.size();
  }
  return mine;
}

} // namespace tessera::inline TESSERA_ABI::partition

#endif
