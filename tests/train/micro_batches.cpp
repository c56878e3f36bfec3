#include <doctest/doctest.h>

#include <tessera/train/micro_batches.hpp>

using namespace tessera;

TEST_CASE("micro-batches are in order, disjoint, cover the share, and none is empty or too large") {
  for (index_t ranks : {1, 2, 3, 7})
    for (index_t batch : {0, 1, 5, 16, 17})
      for (index_t most : {1, 2, 3, 100}) {
        index_t reached = 0;
        for (index_t rank = 0; rank < ranks; ++rank)
          for (auto const& part : train::micro_batches(layout::shard_of(batch, ranks, rank), most)) {
            CHECK(part.begin == reached);
            CHECK(part.size() >= 1);
            CHECK(part.size() <= most);
            reached = part.end;
          }
        CHECK(reached == batch);
      }
}
