#include <tessera/layout/shard.hpp>

#include <doctest/doctest.h>

#include "support/thrown.hpp"

using namespace tessera;
using layout::range;
using layout::shard_of;

TEST_CASE("parts are in order, disjoint, cover everything, and break at granules") {
  for (index_t n : {0, 1, 2, 7, 31, 32, 33, 64, 1021, 4096})
    for (index_t parts : {1, 2, 3, 5, 8, 64, 1000})
      for (index_t granule : {1, 2, 32, 100}) {
        index_t end = 0, least = INT64_MAX, most = 0, previous = INT64_MAX;
        bool in_order = true, at_granules = true, earlier_take_more = true;
        for (index_t p = 0; p < parts; ++p) {
          auto const part = shard_of(n, parts, p, granule);
          in_order = in_order && part.begin == end && part.end >= part.begin;
          at_granules = at_granules && (part.end == n || part.end % granule == 0);
          auto const granules = (part.size() + granule - 1) / granule;
          earlier_take_more = earlier_take_more && granules <= previous;
          previous = granules;
          least = granules < least ? granules : least;
          most = granules > most ? granules : most;
          end = part.end;
        }
        CHECK_UNARY(in_order);
        CHECK_UNARY(at_granules);
        CHECK_UNARY(earlier_take_more);
        CHECK_UNARY(end == n);
        CHECK_UNARY(most - least <= 1);
      }
}

TEST_CASE("it is a constant expression and does not overflow near 2^63") {
  static_assert(shard_of(10, 3, 0) == range{0, 4});
  static_assert(shard_of(10, 3, 2) == range{7, 10});
  static_assert(shard_of(33, 2, 1, 32) == range{32, 33});
  CHECK(shard_of(INT64_MAX, 2, 1).end == INT64_MAX);
  CHECK(shard_of(INT64_MAX, 3, 2, 32).end == INT64_MAX);
  CHECK(shard_of(INT64_MAX, 1, 0, 32) == range{0, INT64_MAX});
}

TEST_CASE("shards that cannot exist are refused") {
  auto const id_of = [](index_t n, index_t parts, index_t part, index_t granule) {
    return test::error_of<size_error>([&] { (void)shard_of(n, parts, part, granule); }).id;
  };
  CHECK(id_of(-1, 1, 0, 1) == "E-layout-001");
  CHECK(id_of(4, 0, 0, 1) == "E-layout-001");
  CHECK(id_of(4, 2, 2, 1) == "E-layout-001");
  CHECK(id_of(4, 2, -1, 1) == "E-layout-001");
  CHECK(id_of(4, 2, 0, 0) == "E-layout-001");
}

TEST_CASE("ranges intersect in what both hold") {
  static_assert(layout::intersection({0, 5}, {3, 9}) == range{3, 5});
  static_assert(layout::intersection({3, 9}, {0, 5}) == range{3, 5});
  static_assert(layout::intersection({0, 9}, {2, 3}) == range{2, 3});
  CHECK(layout::intersection({0, 3}, {3, 9}).empty());
  CHECK(layout::intersection({0, 3}, {7, 9}).empty());
  CHECK(layout::intersection({4, 4}, {0, 9}).empty());
}
