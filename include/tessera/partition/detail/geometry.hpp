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

  /// Elements that this rank sends to others.
  constexpr index_t sent() const {
    auto const n = in.size(), others = ranks() - 1;
    switch (doing.what) {
    case movement::all_reduce: { // each rank adds up one slice, and sends the sums to all
      auto const rank = member_rank();
      auto const slice = layout::shard_of(n, ranks(), rank).size();
      return n - slice + others * slice;
    }
    case movement::reduce_scatter:
      return n - out.size();
    case movement::all_gather:
      return n * others;
    case movement::all_to_all:
      return n - intersection(in, out).size();
    default:
      return 0;
    }
  }
  /// Elements of the larger of the call's two buffers: what a traffic meter counts.
  constexpr index_t payload() const {
    if (!sends(doing.what)) return 0;
    return in.size() > out.size() ? in.size() : out.size();
  }

private:
  constexpr index_t member_rank() const noexcept {
    index_t rank = 0;
    for (auto one : layout::axes_in_order)
      if (doing.along.has(one)) rank = rank * shape.size(one) + me[one];
    return rank;
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
