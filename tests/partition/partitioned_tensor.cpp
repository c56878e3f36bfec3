#include <tessera/partition/partitioned_tensor.hpp>

#include <doctest/doctest.h>

#include <tessera/layout/ownership.hpp>

#include "support/thrown.hpp"

using namespace tessera;
using namespace tessera::partition;
using test::error_of;

namespace {
using rows = placed<axis::tensor, shard<0>>;
using columns = placed<axis::data, shard<1>>;
using matrix = partitioned_tensor<float, 2, host_memory, columns, rows>;
} // namespace

static_assert(std::is_trivially_copyable_v<matrix::view_type>);
static_assert(
    std::same_as<gradient_of<partitioned_tensor<float, 1, host_memory, placed<axis::tensor, replicate>>>,
                 partitioned_view<float, 1, host_memory, placed<axis::tensor, partial<>>>>);
static_assert(std::same_as<gradient_of<matrix>, matrix::view_type>);
static_assert(
    std::convertible_to<matrix::view_type, partitioned_view<float const, 2, host_memory, columns, rows>>);
static_assert(
    !std::convertible_to<matrix::view_type, partitioned_view<float, 2, host_memory, rows, columns>>);

TEST_CASE("each rank has its box, and knows each element's number in the whole") {
  layout::mesh_shape const shape{.data = 2, .tensor = 3};
  for (extents<2> const whole : {extents<2>{7, 5}, {2, 1}, {0, 3}}) {
    index_t held = 0;
    for (int rank = 0; rank < 6; ++rank) {
      memory_meter meter;
      matrix x({shape, rank}, whole, {&meter, memory_kind::activations});
      CHECK(x.local().extents() == x.box().sizes);
      CHECK(meter.current() == x.local().size() * 4);
      held += x.local().size();
      for (index_t i = 0; i < x.local().extent(0); ++i)
        for (index_t j = 0; j < x.local().extent(1); ++j)
          CHECK(x.view().number_of(i, j) == (x.box().begin[0] + i) * whole[1] + x.box().begin[1] + j);
      CHECK(x.whole() == whole);
      CHECK(x.place() == layout::mesh_place{shape, rank});
    }
    CHECK(held == whole[0] * whole[1]);
  }
}

TEST_CASE("a view borrows memory that is there, and refuses what is not this rank's part") {
  layout::mesh_place const place{{.data = 2, .tensor = 2}, 1};
  tensor<float, 2> memory({4, 6});
  auto const x = partitioned<rows>(place, {7, 6}, memory.view().slice(0, 0, 3));
  CHECK(x.local().data() == memory.data());
  CHECK(x.box().begin[0] == 4);
  auto const wrong = error_of<size_error>([&] { partitioned<rows>(place, {7, 6}, memory.view()); });
  CHECK(wrong.id == "E-partition-002");
  CHECK(wrong.says(
      "rank 1 of the mesh data 2 x tensor 2 holds [3, 6] of [7, 6] (tensor: shard<0>), and was given a "
      "view of [4, 6]"));
  auto const gaps = error_of<size_error>([&] {
    partitioned<rows>(place, {8, 3}, memory.view().slice(1, 0, 3));
  });
  CHECK(gaps.id == "E-partition-003");
}

TEST_CASE("the part of a unit's block that ZeRO gives a rank is a shard with the block's granule") {
  using flat = placed<axis::data, shard<0, layout::parameter_map::alignment>>;
  for (index_t block : {0, 32, 96, 3200})
    for (int ranks : {1, 3, 4})
      for (int rank = 0; rank < ranks; ++rank) {
        partitioned_tensor<float, 1, host_memory, flat> const part({{.data = ranks}, rank}, {block});
        CHECK(part.box().range(0) == layout::ownership{rank, ranks}.of(block));
      }
}
