#include <tessera/layout/ownership.hpp>

#include <doctest/doctest.h>

using namespace tessera;
using namespace tessera::layout;

TEST_CASE("every element of a block is owned by exactly one rank") {
  for (index_t block : {0, 32, 64, 96, 1024, 3200})
    for (int ranks : {1, 2, 3, 4, 7, 64}) {
      index_t end = 0;
      for (int r = 0; r < ranks; ++r) {
        auto const mine = ownership{r, ranks}.of(block);
        CHECK(mine.begin == end);
        CHECK(mine.begin % parameter_map::alignment == 0);
        CHECK(mine == ownership{0, ranks}.of(block, r)); // all ranks agree
        end = mine.end;
      }
      CHECK(end == block);
    }
}

TEST_CASE("segments cut a range into its parameters, gaps left out") {
  parameter_map map;
  map.add("a", {10}, parameter_kind::matrix, {}); // [0, 10), gap to 32
  map.add("b", {40}, parameter_kind::bias, {});   // [32, 72), gap to 96
  map.add("c", {3}, parameter_kind::bias, {});    // [96, 99)
  auto const all = segments_of(map, {0, map.block_size()});
  REQUIRE(all.size() == 3);
  CHECK(all[1].whole->name == "b");
  CHECK(all[1].in_block == range{32, 72});
  CHECK(all[1].first_element == 0);
  auto const middle = segments_of(map, {5, 64});
  REQUIRE(middle.size() == 2);
  CHECK(middle[0].in_block == range{5, 10});
  CHECK(middle[0].first_element == 5);
  CHECK(middle[1].in_block == range{32, 64});
  CHECK(segments_of(map, {10, 32}).empty());
  CHECK(segments_of(map, {64, 64}).empty());
  CHECK(segments_of(parameter_map(), {0, 100}).empty());
}

TEST_CASE("over all ranks the segments hold each parameter once") {
  parameter_map map;
  for (index_t n : {1, 31, 32, 33, 1000, 7})
    map.add("p" + std::to_string(n), {n}, parameter_kind::matrix, {});
  for (int ranks : {1, 2, 3, 5, 50}) {
    index_t counted = 0;
    for (int r = 0; r < ranks; ++r)
      for (auto const& s : segments_of(map, ownership{r, ranks}.of(map.block_size())))
        counted += s.in_block.size();
    CHECK(counted == map.parameter_count());
  }
}
