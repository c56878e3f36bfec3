#include <doctest/doctest.h>

#include <vector>

#include <tessera/ops/shapes.hpp>

#include <filesystem>
#include <set>
#include <string>

#include "ops/catalog.hpp"
#include "support/thrown.hpp"

using namespace tessera;
using test::error_of;

namespace {

std::vector<float> memory(64);

view<float, 2> matrix(index_t rows, index_t columns) {
  return {memory.data(), {rows, columns}};
}

} // namespace

TEST_CASE("extents that differ are named with the operation and the argument") {
  ops::require_extents("norm", "gain", matrix(2, 3), {2, 3}, site::here());
  auto const caught = error_of<size_error>([] {
    ops::require_extents("norm", "gain", matrix(2, 3), {3, 2}, site::here());
  });
  CHECK(caught.id == "E-ops-001");
  CHECK(caught.says("norm: gain has extents [2, 3], expected [3, 2]"));
}

TEST_CASE("an argument that may be left out is checked where it is there") {
  ops::require_extents_or_none("norm", "bias", view<float, 2>(), {5, 5}, site::here());
  CHECK(error_of<size_error>([] {
          ops::require_extents_or_none("norm", "bias", matrix(1, 1), {5, 5}, site::here());
        }).id == "E-ops-001");
}

TEST_CASE("rows are dense where their elements are adjacent, however far apart they lie") {
  auto const left_half = matrix(4, 8).slice(1, 0, 4);
  ops::require_dense_rows("norm", "in", left_half, site::here());
  ops::require_rows("norm", "in", left_half, {4, 4}, site::here());
  view<float, 2> const every_second(memory.data(), {4, 4}, {8, 2});
  CHECK(error_of<size_error>([&] { ops::require_dense_rows("norm", "in", every_second, site::here()); }).id ==
        "E-ops-002");
  // A stride between elements that do not exist means nothing.
  ops::require_dense_rows("norm", "in", view<float, 2>(memory.data(), {4, 1}, {8, 2}), site::here());
}

TEST_CASE("gaps between rows make a view that is not contiguous") {
  ops::require_contiguous("cast", "in", matrix(4, 8), site::here());
  ops::require_contiguous("cast", "in", matrix(0, 8), site::here());
  auto const caught = error_of<size_error>(
      [] { ops::require_contiguous("cast", "in", matrix(4, 8).slice(1, 0, 4), site::here()); });
  CHECK(caught.id == "E-ops-003");
  CHECK(caught.says("strides [8, 1]"));
}

TEST_CASE("every operation's header stands in the catalog, and the catalog names no other") {
  std::set<std::string> headers, described;
  auto const folder = std::filesystem::path(TESSERA_TEST_SOURCE_DIR) / "include/tessera/ops";
  for (auto const& entry : std::filesystem::directory_iterator(folder))
    if (entry.path().extension() == ".hpp") headers.insert(entry.path().stem().string());
  headers.erase("elementary"); // functions of one float
  headers.erase("shapes");     // checks
  headers.erase("token_positions");
  for (auto const& operation : catalog::operations) described.insert(std::string(operation.header));
  CHECK(headers == described);
}

TEST_CASE("the catalog's figures are usable: names differ, sizes and costs are positive") {
  std::set<std::string_view> names;
  for (auto const& operation : catalog::operations) {
    CHECK(names.insert(operation.name).second);
    CHECK(operation.bytes(operation.usual, 4) > 0);
    CHECK(operation.flops(operation.usual) >= 0);
    CHECK(operation.against_double.fp32 < operation.against_double.bf16);
  }
}
