#include <doctest/doctest.h>

#include <vector>

#include <tessera/exec/host.hpp>
#include <tessera/nn/rank_group.hpp>

using namespace tessera;

using ex_t = exec::host;

namespace {

struct no_group {};

struct with_group {
  [[no_unique_address]] nn::one_rank group;
  index_t width;
};

} // namespace

TEST_CASE("one rank is a group that takes no room, and an arbitrary type is none") {
  CHECK(nn::rank_group<nn::one_rank, ex_t>);
  CHECK(!nn::rank_group<no_group, ex_t>);
  CHECK(sizeof(with_group) == sizeof(index_t));
}

TEST_CASE("one rank has all rows, tokens and classes, and moves nothing") {
  nn::one_rank const group;
  CHECK(group.alone());
  CHECK(group.rows(7) == layout::range{0, 7});
  CHECK(group.local_sequence(11) == 11);
  CHECK(group.positions(11) == ops::token_positions{});
  auto const part = nn::tensor_part_of(group);
  CHECK(part.ranks == 1);
  CHECK(part.rank == 0);
  CHECK(!part.shares_rows);

  ex_t ex({.threads = 1});
  std::vector<float> rows(6, 2.0f);
  view<float, 2> const local(rows.data(), {3, 2});
  CHECK(group.gather(ex, view<float, 2>(), local).data() == rows.data());
  group.reduce(ex, local, local);
  CHECK(rows == std::vector<float>(6, 2.0f));
  CHECK(group.attention_backward_scratch_bytes<float, host_memory>({}) == 0);
  CHECK(group.statistics_merge_bytes<host_memory>(100) == 0);
}

TEST_CASE("a decoder's positions go on behind what it was fed") {
  auto const positions = nn::positions_of(nn::one_rank(), 3, 20);
  CHECK(positions(0) == 20);
  CHECK(positions(2) == 22);
}
