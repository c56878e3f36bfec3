/// Where the pieces of one step's message stand, and how many bytes travel.
#ifndef TESSERA_PARTITION_DETAIL_GEOMETRY_HPP
#define TESSERA_PARTITION_DETAIL_GEOMETRY_HPP

#include <tessera/partition/box.hpp>
#include <tessera/partition/detail/steps.hpp>

namespace tessera::inline TESSERA_ABI::partition::detail {

/// Coordinates of rank `r` of the group of ranks that differ from `me` in the axes `along` alone.
constexpr layout::mesh_coordinates member(layout::mesh_shape const& shape, layout::mesh_coordinates me,
                                          axis_set along, index_t r) {
  auto const take = [&](axis one, int& coordinate) {
    if (!along.has(one)) return;
    coordinate = narrow<int>(r % shape.size(one));
    r /= shape.size(one);
  };
  take(axis::tensor, me.tensor); // the fastest first
  take(axis::context, me.context);
  take(axis::expert, me.expert);
  take(axis::data, me.data);
  take(axis::pipeline, me.pipeline);
  return me;
}

/// One step as a rank of a mesh sees it.
template <int Rank>
struct stage {
  extents<Rank> whole;
  layout::mesh_shape shape;
  layout::mesh_coordinates me;
  step doing;
  partitioning before, then;
  box<Rank> in, out; ///< What this rank holds before and afterwards.

  constexpr stage(extents<Rank> const& all, layout::mesh_place const& place, partitioning const& now,
                  step const& s)
      : whole(all), shape(place.shape), me(place.coordinates()), doing(s), before(now), then(after(now, s)),
        in(local_box(whole, before, shape, me)), out(local_box(whole, then, shape, me)) {}

  /// Ranks that take part.
  constexpr index_t ranks() const noexcept { return shape.size(doing.along); }

  /// What rank `r` of those sends, or is sent, lies between these in dimension `d` of `mine`. `parts` is the
  /// partitioning that says which range of `d` is whose.
  constexpr layout::range piece(partitioning const& parts, int d, box<Rank> const& mine, index_t r) const {
    auto const theirs =
        local_range(whole[static_cast<std::size_t>(d)], d, parts, shape, member(shape, me, doing.along, r));
    return intersection(mine.range(d), theirs);
  }

  /// Bytes that this rank sends, for elements of `item` bytes, as the traffic meter counts them: what the
  /// usual algorithms send.
  constexpr index_t sent_bytes(index_t item) const {
    auto const before_bytes = in.size() * item, after_bytes = out.size() * item;
    auto const of_others = [&](index_t times, index_t bytes) { // in this order: nothing overflows
      auto const others = ranks() - 1;
      return times * (bytes / ranks() * others) + times * (bytes % ranks()) * others / ranks();
    };
    switch (doing.what) {
    case movement::all_reduce:
      return of_others(2, before_bytes);
    case movement::reduce_scatter:
      return of_others(1, before_bytes);
    case movement::all_gather:
      return of_others(1, after_bytes);
    case movement::all_to_all:
      return before_bytes - intersection(in, out).size() * item;
    default:
      return 0;
    }
  }
};

/// Rows of a box across dimension d: what lies outside of it, and what lies inside, in elements.
template <int Rank>
constexpr index_t outside(box<Rank> const& b, int d) noexcept {
  index_t count = 1;
  for (int i = 0; i < d; ++i) count *= b.sizes[static_cast<std::size_t>(i)];
  return count;
}
template <int Rank>
constexpr index_t inside(box<Rank> const& b, int d) noexcept {
  index_t count = 1;
  for (int i = d + 1; i < Rank; ++i) count *= b.sizes[static_cast<std::size_t>(i)];
  return count;
}

} // namespace tessera::inline TESSERA_ABI::partition::detail

#endif
