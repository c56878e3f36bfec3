#include <tessera/layout/sequence_shards.hpp>

#include <doctest/doctest.h>

#include <algorithm>
#include <vector>

#include "support/thrown.hpp"

using namespace tessera;
using layout::range;
using layout::sequence_assignment;
using layout::sequence_shards;

namespace {

constexpr sequence_assignment assignments[] = {sequence_assignment::contiguous, sequence_assignment::zigzag};
constexpr index_t lengths[] = {0, 1, 2, 3, 7, 8, 16, 37, 64, 1021};
constexpr int rank_counts[] = {1, 2, 3, 4, 8, 13};

} // namespace

TEST_CASE("every position has one owner, and a rank's positions are in order") {
  for (auto assignment : assignments)
    for (auto length : lengths)
      for (auto ranks : rank_counts) {
        sequence_shards const shards{length, ranks, assignment};
        std::vector<int> owners(static_cast<std::size_t>(length));
        bool in_order = true;
        index_t total = 0, least = INT64_MAX;
        for (int r = 0; r < ranks; ++r) {
          auto const mine = shards.positions(r);
          index_t previous = -1;
          for (index_t t = 0; t < mine.size(); ++t) {
            in_order = in_order && mine.at(t) > previous;
            previous = mine.at(t);
            ++owners[static_cast<std::size_t>(previous)];
          }
          CHECK_UNARY(mine.size() == shards.local_length(r));
          CHECK_UNARY(mine.size() <= shards.longest());
          total += mine.size();
          least = std::min(least, mine.size());
        }
        CHECK_UNARY(in_order);
        CHECK_UNARY(total == length);
        CHECK_UNARY(shards.longest() - least <= (assignment == sequence_assignment::zigzag ? 2 : 1));
        for (auto count : owners) CHECK_UNARY(count == 1);
      }
}

TEST_CASE("the blocks between two ranks let through what the causal mask does, and nothing else") {
  for (auto assignment : assignments)
    for (auto length : lengths)
      for (auto ranks : rank_counts) {
        if (length > 64) continue;
        sequence_shards const shards{length, ranks, assignment};
        bool right = true;
        for (int a = 0; a < ranks; ++a)
          for (int b = 0; b < ranks; ++b) {
            auto const queries = shards.positions(a), keys = shards.positions(b);
            auto const block = shards.block(a, b, true);
            for (index_t i = 0; i < queries.size(); ++i)
              for (index_t j = 0; j < keys.size(); ++j) {
                bool const inside = i >= block.queries.begin && i < block.queries.end &&
                                    j >= block.keys.begin && j < block.keys.end;
                right = right && (inside && (!block.causal || j <= i)) == (keys.at(j) <= queries.at(i));
              }
            CHECK_UNARY(shards.block(a, b, false) ==
                        layout::sequence_block{{0, queries.size()}, {0, keys.size()}, false});
          }
        CHECK_UNARY(right);
      }
}

TEST_CASE("zig-zag balances causal work, exactly where chunks are equal; contiguous does not") {
  for (int ranks : rank_counts)
    for (index_t chunk : {1, 5, 32}) {
      sequence_shards const zigzag{2 * ranks * chunk, ranks};
      index_t total = 0;
      for (int r = 0; r < ranks; ++r) {
        total += zigzag.causal_pairs(r);
        CHECK(zigzag.causal_pairs(r) == zigzag.causal_pairs(0));
      }
      CHECK(total == zigzag.length * (zigzag.length + 1) / 2);
    }
  // Uneven chunks: a rank has at most as much more as its one or two longer chunks see.
  sequence_shards const uneven{1021, 4}, in_order{1021, 4, sequence_assignment::contiguous};
  auto const mean = 1021.0 * 1022 / 2 / 4;
  for (int r = 0; r < 4; ++r) CHECK(std::abs(static_cast<double>(uneven.causal_pairs(r)) / mean - 1) < 0.01);
  CHECK(static_cast<double>(in_order.causal_pairs(3)) / mean > 1.74);
  CHECK(static_cast<double>(in_order.causal_pairs(0)) / mean < 0.26);
}

TEST_CASE("it is a constant expression, and what cannot be is refused") {
  static_assert(sequence_shards{16, 2}.positions(0) == layout::sequence_positions{{0, 4}, {12, 16}});
  static_assert(sequence_shards{16, 2}.positions(1) == layout::sequence_positions{{4, 8}, {8, 12}});
  static_assert(sequence_shards{16, 2, sequence_assignment::contiguous}.positions(1) ==
                layout::sequence_positions{{8, 16}, {16, 16}});
  static_assert(sequence_shards{16, 2}.positions(0).at(5) == 13);
  CHECK(test::error_of<size_error>([] { (void)sequence_shards{16, 2}.positions(2); }).id == "E-layout-001");
  CHECK(test::error_of<size_error>([] { (void)sequence_shards{16, 2}.positions(-1); }).id == "E-layout-001");
  CHECK(test::error_of<size_error>([] { (void)sequence_shards{-1, 2}.longest(); }).id == "E-layout-001");
  CHECK(std::string(name_of(sequence_assignment::zigzag)) == "zigzag");
  CHECK(std::string(name_of(sequence_assignment::contiguous)) == "contiguous");
}
