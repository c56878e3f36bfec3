#include <tessera/parallel/buckets.hpp>

#include "fixture.hpp"

using namespace tessera;
using namespace fixture;

TEST_CASE("Buckets run from the last unit to the first, cover all, and are no longer than they must be") {
  for (auto const& sizes : std::vector<std::vector<index_t>>{
           {}, {0}, {5}, {0, 0, 0}, {3, 1, 4, 1, 5, 9, 2, 6}, {100, 1, 1, 1}, {1, 1, 1, 100}, {7, 0, 7, 0}})
    for (index_t least : {1, 2, 7, 8, 100, 1000}) {
      auto const units = units_of(sizes);
      auto const buckets = parallel::buckets_of(units, least);
      auto end = units.size();
      for (std::size_t b = 0; b < buckets.size(); ++b) {
        auto const& each = buckets[b];
        CHECK(each.end_unit == end);
        REQUIRE(each.first_unit < each.end_unit);
        CHECK(each.elements == layout::range{units[each.first_unit].begin, units[each.end_unit - 1].end});
        if (b + 1 < buckets.size()) CHECK(each.elements.size() >= least);
        if (each.end_unit - each.first_unit > 1)
          CHECK(each.elements.end - units[each.first_unit + 1].begin < least);
        end = each.first_unit;
      }
      CHECK(end == 0);
    }
}
