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
        std::vector<index_t> counts;
        ownership{r, ranks}.counts_of(block, counts);
        CHECK(counts.size() == static_cast<std::size_t>(ranks));
        CHECK(counts[static_cast<std::size_t>(r)] == mine.size());
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

TEST_CASE("a share of a matrix is cut into stretches that are adjacent in the whole") {
  parameter_map map;
  // Rows 2 and 3, and 6 and 7, of 9 rows of 5: two heads of a packed projection.
  map.add("rows", {9, 5}, parameter_kind::matrix, {}, {.dimension = 0, .pieces = {{2, 4}, {6, 8}}});
  // Columns 1 to 3 of 4 rows of 6.
  map.add("columns", {4, 6}, parameter_kind::matrix, {}, {.dimension = 1, .pieces = {{1, 4}}});
  CHECK(map[0].shape == std::vector<index_t>{4, 5});
  CHECK(map[1].shape == std::vector<index_t>{4, 3});
  CHECK(map[1].whole_size() == 24);

  // Written out: element (r, c) of each part, where it stands here and in the whole.
  std::vector<std::pair<index_t, index_t>> expected, found;
  index_t const rows[] = {2, 3, 6, 7};
  for (index_t r = 0; r < 4; ++r)
    for (index_t c = 0; c < 5; ++c) expected.push_back({r * 5 + c, rows[r] * 5 + c});
  for (index_t r = 0; r < 4; ++r)
    for (index_t c = 0; c < 3; ++c) expected.push_back({map[1].offset + r * 3 + c, r * 6 + 1 + c});
  for (auto const& s : segments_of(map, {0, map.block_size()}))
    for (index_t i = 0; i < s.in_block.size(); ++i)
      found.push_back({s.in_block.begin + i, s.first_element + i});
  CHECK(found == expected);
  CHECK(map[0].runs().size() == 2);

  auto const cut = segments_of(map, {7, 12}); // the middle of two adjacent rows
  REQUIRE(cut.size() == 2);
  CHECK(cut[0].first_element == 17);
  CHECK(cut[1].in_block == range{10, 12});
  CHECK(cut[1].first_element == 30);
}

TEST_CASE("of the ranks that hold a copy, one counts it") {
  parameter_map map;
  map.add("cut", {8}, parameter_kind::bias, {}, {.dimension = 0, .pieces = {{0, 2}}});
  map.add("pairs", {4}, parameter_kind::bias, {}, {.copies = 2, .partial = true});
  map.add("all", {4}, parameter_kind::bias, {}, {.copies = 4});
  range const block{0, map.block_size()};
  CHECK(counted_ranges(map, block, 0).size() == 3);
  CHECK(counted_ranges(map, block, 1) == std::vector<range>{{0, 2}});
  CHECK(counted_ranges(map, block, 2).size() == 2);
  CHECK(counted_ranges(map, {1, 2}, 3) == std::vector<range>{{1, 2}});
  CHECK(counted_ranges(map, {2, 64}, 3).empty());
}

TEST_CASE(
    "borders of pieces are the same for any number of ranks, and the ranks' runs of them cover the block") {
  for (index_t size : {index_t{0}, index_t{1}, index_t{33}, index_t{64}, index_t{2049}, index_t{100000}})
    for (int pieces : {1, 7, 64})
      for (int ranks : {1, 2, 3, 8, 70}) {
        index_t end = 0;
        for (int r = 0; r < ranks; ++r) {
          ownership const who{r, ranks, pieces};
          auto const mine = who.of(size);
          CHECK(mine.begin == end);
          end = mine.end;
          auto const run = who.pieces_of(r);
          index_t inside = 0;
          for (auto i = run.begin; i < run.end; ++i) {
            CHECK(who.piece(size, i) == shard_of(size, pieces, i, parameter_map::alignment));
            CHECK(intersection(who.piece(size, i), mine) == who.piece(size, i));
            inside += who.piece(size, i).size();
          }
          CHECK(inside == mine.size());
        }
        CHECK(end == size);
      }
}

TEST_CASE("an impossible share is refused") {
  parameter_map map;
  CHECK_THROWS_AS(map.add("a", {4}, parameter_kind::bias, {}, {.dimension = 1}), size_error);
  CHECK_THROWS_AS(map.add("a", {4}, parameter_kind::bias, {}, {.copies = 0}), size_error);
  CHECK_THROWS_AS(map.add("a", {4}, parameter_kind::bias, {}, {.dimension = 0, .pieces = {{3, 5}}}),
                  size_error);
  CHECK(map.size() == 0);
}
