#include <tessera/layout/mesh_shape.hpp>

#include <doctest/doctest.h>

#include "support/thrown.hpp"

using namespace tessera;
using namespace tessera::layout;

static_assert(mesh_shape{.pipeline = 2, .data = 2, .tensor = 4}.size() == 16);
static_assert(mesh_shape{.pipeline = 2, .data = 2, .tensor = 4}.coordinate(13, axis::tensor) == 1);
static_assert(
    mesh_shape{.pipeline = 2, .data = 2, .tensor = 4}.rank_of({.pipeline = 1, .data = 1, .tensor = 1}) == 13);

TEST_CASE("a rank is ((p * D + d) * C + c) * N + t, and its coordinates lead back to it") {
  for (mesh_shape const shape : {mesh_shape{}, mesh_shape{.tensor = 3}, mesh_shape{.pipeline = 2, .data = 3},
                                 mesh_shape{.pipeline = 3, .data = 2, .context = 2, .tensor = 4},
                                 mesh_shape{.data = 2, .context = 3, .tensor = 2, .expert = 2}})
    for (int rank = 0; rank < shape.size(); ++rank) {
      auto const at = shape.coordinates(rank);
      for (auto one : axes_in_order) {
        CHECK(at[one] == shape.coordinate(rank, one));
        CHECK(at[one] >= 0);
        CHECK(at[one] < shape.size(one));
      }
      CHECK(shape.rank_of(at) == rank);
      auto const expected =
          (((at.pipeline * shape.data + at.data) * shape.expert + at.expert) * shape.context + at.context) *
              shape.tensor +
          at.tensor;
      CHECK(expected == rank);
    }
}

TEST_CASE("sets of axes multiply their sizes and print slowest first") {
  mesh_shape const shape{.pipeline = 3, .data = 2, .context = 5, .tensor = 4};
  CHECK(shape.size(axis::context) == 5);
  CHECK(shape.size(axis::context | axis::data) == 10);
  CHECK(shape.size(gradient_axes) == 10);
  CHECK(shape.size(axis_set()) == 1);
  CHECK(shape.size() == 120);
  CHECK((axis::data | axis::context).has(axis::context));
  CHECK_FALSE((axis::data | axis::context).has(axis::tensor));
  CHECK(text_of(axis::context | axis::data) == "data x context");
  CHECK(text_of(shape) == "pipeline 3 x data 2 x context 5 x tensor 4");
  CHECK(text_of(mesh_shape{}) == "one rank");
}

TEST_CASE("a shape that is no mesh of the ranks there are says how to make it one") {
  auto const thrown = [](mesh_shape shape, int ranks) {
    return test::error_of<config_error>([&] { shape.validate(ranks); });
  };
  mesh_shape{.data = 2, .tensor = 4}.validate(8);
  auto const more = thrown({.data = 2, .tensor = 2}, 8);
  CHECK(more.id == "E-layout-011");
  CHECK(
      more.says("data 2 x tensor 2 takes 4 ranks, and there are 8; with data = 4 it fits, or start 4 ranks"));
  auto const odd = thrown({.data = 2, .tensor = 3}, 8);
  CHECK(odd.says("takes 6 ranks, and there are 8; start 6 ranks, or choose sizes whose product is 8"));
  auto const empty = thrown({.data = 0}, 1);
  CHECK(empty.id == "E-layout-010");
  CHECK(empty.says("the data axis has 0 ranks"));
  CHECK(thrown({.pipeline = -1, .data = -1}, 1).id == "E-layout-010");
  constexpr auto large = 2147483647;
  CHECK(thrown({.pipeline = large, .data = large, .context = large}, 1).id == "E-layout-011");
}
