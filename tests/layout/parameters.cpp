#include <tessera/layout/parameters.hpp>

#include <doctest/doctest.h>

#include "support/thrown.hpp"

using namespace tessera;
using namespace tessera::layout;

TEST_CASE("parameters stand in order, each at an aligned offset") {
  parameter_map map;
  auto const w = map.add("w", {3, 5}, parameter_kind::matrix, normal_values(0.02f));
  auto const b = map.add("b", {32}, parameter_kind::bias, constant_values(0));
  auto const g = map.add("g", {33}, parameter_kind::norm_gain, constant_values(1));
  CHECK(map.size() == 3);
  CHECK(map[w].offset == 0);
  CHECK(map[w].size == 15);
  CHECK(map[b].offset == 32);
  CHECK(map[g].offset == 64);
  CHECK(map.block_size() == 128);
  CHECK(map.parameter_count() == 15 + 32 + 33);
  CHECK(map[g].where() == range{64, 97});
  CHECK(map[w].start.deviation == 0.02f);
  CHECK(map[g].start.mean == 1);
  index_t seen = 0;
  for (auto const& p : map) seen += p.size;
  CHECK(seen == map.parameter_count());
}

TEST_CASE("empty and scalar parameters are ordinary") {
  parameter_map map;
  CHECK(map.block_size() == 0);
  map.add("none", {0, 7}, parameter_kind::matrix, {});
  map.add("scalar", {}, parameter_kind::bias, {});
  CHECK(map[0].size == 0);
  CHECK(map[1].size == 1);
  CHECK(map.block_size() == 32);
}

TEST_CASE("two parameters of one name, and impossible shapes, are refused and leave the map as it was") {
  parameter_map map;
  map.add("w", {4}, parameter_kind::matrix, {});
  CHECK(test::error_of<config_error>([&] { map.add("w", {4}, parameter_kind::bias, {}); }).id ==
        "E-layout-002");
  CHECK(test::error_of<size_error>([&] { map.add("v", {-4}, parameter_kind::bias, {}); }).id == "E-core-001");
  CHECK(test::error_of<size_error>([&] {
          map.add("v", {index_t{1} << 40, index_t{1} << 40}, parameter_kind::bias, {});
        }).id == "E-core-002");
  CHECK(map.size() == 1);
  CHECK(map.block_size() == 32);
}

TEST_CASE("a block that would pass 2^63 elements is refused") {
  parameter_map map;
  map.add("half", {index_t{1} << 62}, parameter_kind::matrix, {});
  CHECK(test::error_of<size_error>([&] {
          map.add("rest", {index_t{1} << 62}, parameter_kind::matrix, {});
        }).id == "E-layout-003");
  CHECK(test::error_of<size_error>([&] {
          parameter_map().add("all", {INT64_MAX}, parameter_kind::matrix, {});
        }).id == "E-layout-003");
  CHECK(map.size() == 1);
}

TEST_CASE("a name's stream is FNV-1a, which publishes these values") {
  static_assert(stream_of("") == 0xcbf29ce484222325u);
  static_assert(stream_of("a") == 0xaf63dc4c8601ec8cu);
  static_assert(stream_of("foobar") == 0x85944171f73967e8u);
}

TEST_CASE("kinds have names") {
  CHECK(std::string(name_of(parameter_kind::matrix)) == "matrix");
  CHECK(std::string(name_of(parameter_kind::position_embedding)) == "position_embedding");
}

TEST_CASE("joined parameters follow each other without a gap and are padded as one") {
  parameter_map map;
  map.add("norm", {3}, parameter_kind::norm_gain, {});
  map.add("q", {5, 3}, parameter_kind::matrix, {});
  map.add_joined("k", {2, 3}, parameter_kind::matrix, {});
  map.add_joined("v", {2, 3}, parameter_kind::matrix, {});
  map.add("next", {1}, parameter_kind::bias, {});
  CHECK(map[1].where() == range{32, 47});
  CHECK(map[2].where() == range{47, 53});
  CHECK(map[3].where() == range{53, 59});
  CHECK(map[4].offset == 64);
  CHECK(map.block_size() == 96);
  parameter_map first;
  first.add_joined("alone", {4}, parameter_kind::bias, {});
  CHECK(first[0].offset == 0);
  CHECK(first.block_size() == 32);
}
