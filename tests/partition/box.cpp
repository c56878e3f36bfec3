#include <tessera/partition/box.hpp>

#include <vector>

#include <doctest/doctest.h>

using namespace tessera;
using namespace tessera::partition;

TEST_CASE("boxes along the cut axes are disjoint and cover the whole, nested, uneven and empty ones too") {
  layout::mesh_shape const shape{.data = 3, .context = 2, .tensor = 2};
  for (auto const& parts : {partitioning_of<placed<axis::data, shard<0>>, placed<axis::context, shard<0>>,
                                            placed<axis::tensor, shard<1>>>,
                            partitioning_of<placed<axis::data, shard<0>>, placed<axis::context, shard<0>>,
                                            placed<axis::tensor, shard<0>>>,
                            partitioning_of<placed<axis::tensor, shard<1, 2>>, placed<axis::data, shard<1>>,
                                            placed<axis::context, shard<0>>>})
    for (extents<2> const whole : {extents<2>{7, 5}, {1, 2}, {0, 4}, {24, 24}}) {
      CAPTURE(text_of(parts));
      CAPTURE(text_of(whole));
      std::vector<int> holders(static_cast<std::size_t>(whole[0] * whole[1]));
      for (int rank = 0; rank < shape.size(); ++rank) {
        auto const mine = local_box(whole, parts, shape, shape.coordinates(rank));
        CHECK(mine.size() == mine.sizes[0] * mine.sizes[1]);
        for (auto i = mine.begin[0]; i < mine.range(0).end; ++i)
          for (auto j = mine.begin[1]; j < mine.range(1).end; ++j)
            ++holders[static_cast<std::size_t>(i * whole[1] + j)];
      }
      for (auto each : holders) CHECK(each == 1);
    }
}

TEST_CASE("the first listed axis cuts first, and placements that do not cut leave the whole") {
  layout::mesh_shape const shape{.data = 2, .tensor = 2};
  constexpr auto parts = partitioning_of<placed<axis::data, shard<0>>, placed<axis::tensor, shard<0>>>;
  // 5 rows: 3 and 2, then 2, 1 and 1, 1.
  index_t const first[] = {0, 2, 3, 4}, size[] = {2, 1, 1, 1};
  for (int rank = 0; rank < 4; ++rank)
    CHECK(local_range(5, 0, parts, shape, shape.coordinates(rank)) ==
          layout::range{first[rank], first[rank] + size[rank]});
  constexpr auto same = partitioning_of<placed<axis::data, partial<>>, placed<axis::tensor, replicate>>;
  for (int rank = 0; rank < 4; ++rank)
    CHECK(local_box(extents<2>{5, 3}, same, shape, shape.coordinates(rank)) == box<2>{{0, 0}, {5, 3}});
}

TEST_CASE("what two boxes share may be nothing") {
  box<2> const a{{0, 2}, {4, 4}}, b{{3, 0}, {4, 3}}, c{{4, 0}, {1, 9}};
  CHECK(intersection(a, b) == box<2>{{3, 2}, {1, 1}});
  CHECK(intersection(a, c).size() == 0);
}
