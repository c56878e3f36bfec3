// requires: mpi
// mpi_ranks: 2
// own_main
// Redistributions over MPI: the same templates, checked against the same reference; each rank compares what
// it holds itself.
#define DOCTEST_CONFIG_IMPLEMENT
#include <doctest/doctest.h>

#include <tessera/partition/redistribute.hpp>

#include <tessera/comm/mpi.hpp>

#include "partition/fixture.hpp"

using namespace tessera;
using namespace tessera::partition;
using test::laid_out;
using test::numbers;

namespace {

/// Along the tensor axis from `from` to `to`, blocking or as a request; the local result.
template <class From, class To>
void check_pair(exec::host& ex, mesh<comm::mpi>& on, bool blocking) {
  extents<2> const whole{5, 3};
  laid_out const from{partitioning_of<placed<axis::tensor, From>>, on.shape(), whole[0], whole[1]};
  laid_out const to{partitioning_of<placed<axis::tensor, To>>, on.shape(), whole[0], whole[1]};
  CAPTURE(text_of(from.parts));
  CAPTURE(text_of(to.parts));
  auto const values = test::whole_values(15);
  auto const me = static_cast<std::size_t>(on.rank());
  partitioned_tensor<float, 2, host_memory, placed<axis::tensor, From>> x(on.place(), whole);
  partitioned_tensor<float, 2, host_memory, placed<axis::tensor, To>> y(on.place(), whole);
  auto const input = from.spread(values)[me];
  for (std::size_t i = 0; i < input.size(); ++i) x.local().data()[i] = static_cast<float>(input[i]);
  if (blocking)
    redistribute(ex, on, y, x);
  else
    start_redistribute(ex, on, y, x).wait();
  // What this rank has, and for summands what the other has.
  std::vector<numbers> all;
  for (int rank = 0; rank < on.world().size(); ++rank) {
    auto n = on.rank() == rank ? y.local().size() : index_t{0};
    on.world().broadcast(std::span(&n, 1), rank);
    numbers theirs(static_cast<std::size_t>(n));
    if (on.rank() == rank)
      for (index_t i = 0; i < n; ++i) theirs[static_cast<std::size_t>(i)] = y.local().data()[i];
    on.world().broadcast(std::span(theirs), rank);
    all.push_back(theirs);
  }
  test::check_value(to, all, values);
}

template <class From, class... To>
void check_from(exec::host& ex, mesh<comm::mpi>& on) {
  for (bool const blocking : {true, false}) (check_pair<From, To>(ex, on, blocking), ...);
}

} // namespace

TEST_CASE("every pair of placements over MPI, blocking and as requests, has the reference's values") {
  comm::mpi world(MPI_COMM_WORLD, {.checked = true, .stall_limit = 30});
  mesh on(world, {.tensor = world.size()});
  exec::host ex({.threads = 1});
  check_from<invariant, replicate, shard<0>, shard<1>, partial<>>(ex, on);
  check_from<shard<0>, invariant, shard<0>, shard<1>, partial<>>(ex, on);
  check_from<shard<1>, invariant, shard<0>, shard<1>, partial<>>(ex, on);
  check_from<partial<>, invariant, shard<0>, shard<1>, partial<>>(ex, on);
}

TEST_CASE("communicators of a mesh are split from the host application's") {
  comm::mpi world(MPI_COMM_WORLD);
  mesh on(world, {.data = 2});
  CHECK(on.gradient_group().all_reduce(1) == 2);
  CHECK(on.along(axis::tensor).size() == 1);
  mesh copy(on.along(axis::tensor), {}); // a mesh of a part of the ranks
  CHECK(copy.world().size() == 1);
}

int main(int argc, char** argv) {
  comm::mpi_environment environment(argc, argv);
  doctest::Context context(argc, argv);
  int rank = 0;
  MPI_Comm_rank(MPI_COMM_WORLD, &rank);
  if (rank != 0) context.setOption("minimal", true);
  return context.run();
}
