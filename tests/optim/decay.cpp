#include <tessera/optim/decay.hpp>

#include "fixture.hpp"

using namespace tessera;
using namespace fixture;
using layout::parameter_kind;

namespace {

layout::parameter_map example() {
  layout::parameter_map map;
  map.add("embedding", {5, 7}, parameter_kind::token_embedding, {});
  map.add("gain", {7}, parameter_kind::norm_gain, {});
  map.add("shift", {7}, parameter_kind::norm_bias, {});
  map.add("weight", {3, 7}, parameter_kind::matrix, {});
  map.add("bias", {3}, parameter_kind::bias, {});
  map.add("positions", {4, 7}, parameter_kind::position_embedding, {});
  return map;
}

} // namespace

TEST_CASE("By default the parameters of two dimensions decay and no other") {
  auto const map = example();
  CHECK(optim::decayed_ranges(map) ==
        std::vector<layout::range>{map[0].where(), map[3].where(), map[5].where()});
  CHECK(optim::decayed_ranges(map, {.position_embedding = false, .bias = true}) ==
        std::vector<layout::range>{map[0].where(), map[3].where(), map[4].where()});
  CHECK(optim::decayed_ranges(layout::parameter_map{}).empty());
}

TEST_CASE("The masks of the shards of a block, put together, are the mask of the block") {
  auto const map = example();
  auto const whole = optim::decayed_ranges(map);
  for (index_t parts : {1, 2, 3, 5, 11})
    for (index_t granule : {1, 32}) {
      std::vector<bool> seen(static_cast<std::size_t>(map.block_size()));
      for (index_t p = 0; p < parts; ++p) {
        auto const part = layout::shard_of(map.block_size(), parts, p, granule);
        for (auto r : optim::ranges_within(whole, part)) {
          CHECK(r.begin >= 0);
          CHECK(r.end <= part.size());
          for (auto i = r.begin; i < r.end; ++i) seen[static_cast<std::size_t>(part.begin + i)] = true;
        }
      }
      for (index_t i = 0; i < map.block_size(); ++i)
        if (seen[static_cast<std::size_t>(i)] != decays(whole, i))
          FAIL("element ", i, " of ", parts, " parts");
    }
}
