#include <tessera/partition/placements.hpp>

#include <doctest/doctest.h>

using namespace tessera;
using namespace tessera::partition;
using comm::reduction;

// The gradient's placement, and that of the gradient's gradient.
static_assert(std::same_as<dual<replicate>, partial<>> && std::same_as<dual<partial<>>, replicate>);
static_assert(std::same_as<dual<invariant>, invariant>);
static_assert(std::same_as<dual<shard<1, 8>>, shard<1, 8>>);
static_assert(differentiable<partial<>> && !differentiable<partial<reduction::max>>);

// What can become what.
static_assert(becomes<partial<>, replicate> && becomes<partial<>, shard<0>> && becomes<shard<0>, partial<>>);
static_assert(becomes<replicate, partial<>> && becomes<invariant, replicate> &&
              becomes<replicate, invariant>);
static_assert(becomes<partial<reduction::max>, shard<2>> &&
              becomes<partial<reduction::max>, partial<reduction::max>>);
static_assert(!becomes<partial<reduction::max>, partial<>> && !becomes<partial<>, partial<reduction::max>>);
static_assert(!becomes<replicate, partial<reduction::max>> && !becomes<shard<0>, partial<reduction::min>>);
static_assert(!becomes<int, replicate> && !placement_type<placement>);

// Lists that one tensor can have.
using rows = placed<axis::tensor, shard<0>>;
using columns_too = placed<axis::data, shard<1>>;
static_assert(placements_of_rank<2, rows, columns_too> && !placements_of_rank<1, rows, columns_too>);
static_assert(placements_of_rank<1, rows, placed<axis::data, shard<0>>>); // one dimension cut twice
static_assert(!placements_of_rank<2, rows, placed<axis::tensor, replicate>>);
static_assert(
    !placements_of_rank<2, placed<axis::data, partial<>>, placed<axis::tensor, partial<reduction::max>>>);
static_assert(placements_of_rank<2> && !placements_of_rank<2, shard<0>>);
static_assert(std::is_empty_v<rows> && std::is_empty_v<shard<0>> &&
              std::is_trivially_copyable_v<partitioning>);

TEST_CASE("placements and lists of them print as they are written") {
  CHECK(text_of(replicate::value) == "replicate");
  CHECK(text_of(invariant::value) == "invariant");
  CHECK(text_of(shard<1>::value) == "shard<1>");
  CHECK(text_of(shard<0, 32>::value) == "shard<0, 32>");
  CHECK(text_of(partial<>::value) == "partial<sum>");
  CHECK(text_of(partial<reduction::min>::value) == "partial<min>");
  CHECK(text_of(partitioning_of<columns_too, rows>) == "data: shard<1>, tensor: shard<0>");
  CHECK(text_of(partitioning_of<>) == "");
}

TEST_CASE("a list is the same for the same axes and placements in the same order") {
  CHECK(partitioning_of<columns_too, rows> == partitioning_of<columns_too, rows>);
  CHECK_FALSE(partitioning_of<columns_too, rows> == partitioning_of<rows, columns_too>);
  CHECK_FALSE(partitioning_of<rows> == partitioning_of<placed<axis::tensor, shard<0, 2>>>);
}
