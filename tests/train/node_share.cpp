#include <doctest/doctest.h>

#include <tessera/comm/threads.hpp>
#include <tessera/train/node_share.hpp>

using namespace tessera;

namespace {

train::detail::node_place place(char const* name, std::size_t first, std::size_t last) {
  train::detail::node_place made;
  std::strcpy(made.name, name);
  for (auto core = first; core < last; ++core) CPU_SET(core, &made.cores);
  return made;
}

} // namespace

TEST_CASE("ranks that are bound to nothing divide their machine, however many machines there are") {
  std::vector<train::detail::node_place> places;
  for (auto const* name : {"a", "b", "a", "a", "b"}) places.push_back(place(name, 0, 64));
  auto const second_of_b = train::detail::share_of(4, places);
  CHECK(second_of_b.rank == 1);
  CHECK(second_of_b.ranks == 2);
  CHECK(second_of_b.cores == 32);
  auto const third_of_a = train::detail::share_of(3, places);
  CHECK(third_of_a.rank == 2);
  CHECK(third_of_a.ranks == 3);
  CHECK(third_of_a.cores == 21);
}

TEST_CASE("ranks that are bound keep what is their own, and divide what they have in common") {
  std::vector<train::detail::node_place> const places{place("a", 0, 8), place("a", 8, 16),
                                                      place("a", 12, 16)};
  CHECK(train::detail::share_of(0, places).cores == 8);
  CHECK(train::detail::share_of(1, places).cores == 6); // four alone and half of four
  CHECK(train::detail::share_of(2, places).cores == 2);
}

TEST_CASE("more ranks than cores have one each") {
  std::vector<train::detail::node_place> const places(5, place("a", 0, 2));
  for (int rank = 0; rank < 5; ++rank) CHECK(train::detail::share_of(rank, places).cores == 1);
}

TEST_CASE("three ranks on three cores have one each, whatever thirds add up to") {
  std::vector<train::detail::node_place> const places(3, place("a", 0, 3));
  CHECK(train::detail::share_of(0, places).cores == 1);
  std::vector<train::detail::node_place> const six(3, place("a", 0, 6));
  CHECK(train::detail::share_of(0, six).cores == 2);
}

TEST_CASE("thread ranks see each other and the cores that their thread may use") {
  cpu_set_t before;
  REQUIRE(sched_getaffinity(0, sizeof before, &before) == 0);
  auto const all = CPU_COUNT(&before);
  comm::run_threads(2, [&](comm::threads& ranks) {
    auto const share = train::node_share_of(ranks);
    CHECK(share.rank == ranks.rank());
    CHECK(share.ranks == 2);
    CHECK(share.cores == std::max(1, all / 2));
  });
}
