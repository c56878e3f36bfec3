#include <tessera/core/extents.hpp>

#include <doctest/doctest.h>

#include "support/thrown.hpp"

using namespace tessera;

TEST_CASE("element_count multiplies; any zero makes it zero, whatever stands beside it") {
  CHECK(element_count(extents<3>{2, 3, 5}) == 30);
  CHECK(element_count(extents<1>{0}) == 0);
  CHECK(element_count(extents<2>{0, INT64_MAX}) == 0);
  CHECK(element_count(extents<2>{INT64_MAX, 0}) == 0);
  CHECK(element_count(extents<2>{INT64_MAX, 1}) == INT64_MAX);
  CHECK(element_count(extents<2>{index_t{1} << 31, (index_t{1} << 32) - 1}) == ((index_t{1} << 32) - 1)
                                                                                   << 31);
  static_assert(element_count(extents<2>{4, 4}) == 16);
}

TEST_CASE("element_count refuses negative extents and products beyond 2^63 - 1") {
  CHECK(test::error_of<size_error>([] { element_count(extents<2>{3, -1}); }).id == "E-core-001");
  CHECK(test::error_of<size_error>([] { element_count(extents<2>{0, INT64_MIN}); }).id == "E-core-001");
  CHECK(test::error_of<size_error>([] { element_count(extents<2>{INT64_MAX, 2}); }).id == "E-core-002");
  CHECK(test::error_of<size_error>([] {
          element_count(extents<2>{index_t{1} << 32, index_t{1} << 31});
        }).id == "E-core-002");
  CHECK(test::error_of<size_error>([] {
          element_count(extents<3>{index_t{1} << 40, 0, index_t{1} << 40});
        }).id == "E-core-002");
}

TEST_CASE("narrow keeps what fits and refuses what does not, signs included") {
  CHECK(narrow<int>(index_t{INT32_MAX}) == INT32_MAX);
  CHECK(narrow<int>(index_t{INT32_MIN}) == INT32_MIN);
  CHECK(narrow<std::uint8_t>(255) == 255);
  CHECK(narrow<std::uint64_t>(index_t{INT64_MAX}) == std::uint64_t{INT64_MAX});
  auto const id_of = [](auto f) { return test::error_of<size_error>(f).id; };
  CHECK(id_of([] { narrow<int>(index_t{INT32_MAX} + 1); }) == "E-core-003");
  CHECK(id_of([] { narrow<int>(index_t{INT32_MIN} - 1); }) == "E-core-003");
  CHECK(id_of([] { narrow<std::uint8_t>(256); }) == "E-core-003");
  CHECK(id_of([] { narrow<std::uint64_t>(index_t{-1}); }) == "E-core-003");
  CHECK(id_of([] { narrow<index_t>(UINT64_MAX); }) == "E-core-003");
  CHECK(test::error_of<size_error>([] { narrow<int>(index_t{1} << 40); }).says("1099511627776"));
}

TEST_CASE("extents print as a list") {
  CHECK(text_of(extents<3>{2, 0, 5}) == "[2, 0, 5]");
  CHECK(text_of(extents<1>{7}) == "[7]");
}
