// requires: mpi
// mpi_ranks: 2
// own_main
#define DOCTEST_CONFIG_IMPLEMENT
#include <doctest/doctest.h>

#include <tessera/comm/mpi.hpp>

#include "support/thrown.hpp"

#if defined(__SANITIZE_ADDRESS__)
#include <sanitizer/lsan_interface.h>
/// In its scope: a transfer that can't be called back may write to its memory for ever, so that memory is
/// never given back, on purpose.
class left_to_mpi {
public:
  left_to_mpi() { __lsan_disable(); }
  ~left_to_mpi() { __lsan_enable(); }
};
#else
struct left_to_mpi {
  left_to_mpi() {}
};
#endif

struct model {
  template <class Body>
  static void run(Body body, tessera::comm::communicator_options options = {}) {
    tessera::comm::mpi ranks(MPI_COMM_WORLD, {.checked = options.checked});
    body(ranks);
    tessera::comm::mpi watched(MPI_COMM_WORLD, {.checked = options.checked, .stall_limit = 30});
    body(watched);
  }
};

#include "comm/conformance.hpp"

using namespace tessera;

namespace {

/// A barrier that the communicators under test know nothing of.
void meet() {
  MPI_Barrier(MPI_COMM_WORLD);
}

} // namespace

TEST_CASE("a borrowed communicator keeps its error handler and its messages") {
  MPI_Comm theirs = MPI_COMM_NULL;
  MPI_Comm_dup(MPI_COMM_WORLD, &theirs);
  MPI_Errhandler before = MPI_ERRHANDLER_NULL, after = MPI_ERRHANDLER_NULL;
  MPI_Comm_get_errhandler(theirs, &before);
  {
    comm::mpi ours(theirs);
    int const other = 1 - ours.rank();
    float sent = 1, received = 0;
    MPI_Request pending = MPI_REQUEST_NULL;
    MPI_Irecv(&received, 1, MPI_FLOAT, MPI_ANY_SOURCE, MPI_ANY_TAG, theirs, &pending);
    float const mine = 2;
    float got = 0;
    auto request = ours.start_receive(std::span(&got, 1), other, 3);
    ours.send(std::span(&mine, 1), other, 3);
    request.wait();
    CHECK(got == 2);
    MPI_Send(&sent, 1, MPI_FLOAT, other, 3, theirs);
    MPI_Wait(&pending, MPI_STATUS_IGNORE);
    CHECK(received == 1);
  }
  MPI_Comm_get_errhandler(theirs, &after);
  CHECK(before == after);
  int size = 0;
  CHECK(MPI_Comm_size(theirs, &size) == MPI_SUCCESS);
  MPI_Comm_free(&theirs);
}

TEST_CASE("ranks with different checking levels or limits get an error, not a hang") {
  int rank = 0;
  MPI_Comm_rank(MPI_COMM_WORLD, &rank);
  auto end = test::error_of<config_error>([&] { comm::mpi c(MPI_COMM_WORLD, {.checked = rank == 1}); });
  CHECK(end.id == "E-comm-031");
  CHECK(end.says("rank 1 has checked = true"));
  end = test::error_of<config_error>(
      [&] { comm::mpi c(MPI_COMM_WORLD, {.stall_limit = rank == 1 ? 5.0 : 0.0}); });
  CHECK(end.id == "E-comm-031");
}

TEST_CASE("a receive that is taken back leaves its communicator as it was") {
  comm::mpi c(MPI_COMM_WORLD);
  std::vector<float> data(3, 1.0f);
  auto taken = c.start_receive(std::span(data), 1 - c.rank(), 5);
  c.barrier();
  taken.withdraw();
  CHECK(taken.test());
  CHECK(c.all_reduce(1) == 2);
  auto kept = c.start_receive(std::span(data), 1 - c.rank(), 5);
  std::vector<float> const mine(3, 2.0f);
  c.send(std::span(mine), 1 - c.rank(), 5);
  kept.wait();
  CHECK(data == mine);
}

TEST_CASE("a thread level that MPI was not initialised with is refused") {
  auto const end = test::error_of<config_error>(
      [] { comm::mpi c(MPI_COMM_WORLD, {.level = comm::mpi_threads::multiple}); });
  CHECK(end.id == "E-comm-033");
  CHECK(end.says("MPI was initialised with MPI_THREAD_FUNNELED, need MPI_THREAD_MULTIPLE"));
  int argc = 0;
  char** argv = nullptr;
  CHECK(test::error_of<config_error>([&] { comm::mpi_environment again(argc, argv); }).id == "E-comm-035");
}

TEST_CASE("a checked communicator tells all ranks of a mismatch, and can go on") {
  comm::mpi c(MPI_COMM_WORLD, {.checked = true});
  std::vector<float> data(12);
  auto const says = [&](auto f, char const* text) {
    auto const end = test::error_of<collective_mismatch>(f);
    CHECK(end.id == "E-comm-010");
    CHECK(end.says(text));
    CHECK(end.says("at mpi.cpp:"));
  };
  bool const odd = c.rank() == 1;
  says([&] { odd ? c.barrier() : c.all_reduce(std::span(data)); }, "rank 1 barrier");
  says([&] { c.all_reduce(std::span(data).first(odd ? 11 : 12)); }, "of 11 fp32");
  says([&] { c.broadcast(std::span(data), odd ? 1 : 0); }, "broadcast with root 1 of 12 fp32");
  says(
      [&] {
        c.all_reduce(std::span(data), {.order = odd ? comm::summation::native : comm::summation::rank_order});
      },
      "all_reduce (sum, native)");
  auto pending = c.start_all_reduce(std::span(data).first(odd ? 11 : 12));
  says([&] { pending.wait(); }, "of 11 fp32");
  std::vector<index_t> const gives = {2, 2}, gets = odd ? std::vector<index_t>{3, 2} : gives;
  auto const end = test::error_of<collective_mismatch>(
      [&] { c.all_to_all_v(std::span(data).first(odd ? 5 : 4), gets, std::vector<float>(4), gives); });
  CHECK(end.id == "E-comm-011");
  CHECK(end.says("rank 0 sends 2 elements to rank 1, which expects 3"));
  CHECK(c.all_reduce(1) == 2);
}

TEST_CASE("the watchdog names the collective and what the others do, on all ranks") {
  left_to_mpi const scope;
  {
    comm::mpi c(MPI_COMM_WORLD, {.stall_limit = 0.2});
    std::vector<float> data(9);
    if (c.rank() == 1) { // busy elsewhere until the other has given up
      auto const start = MPI_Wtime();
      while (MPI_Wtime() - start < 0.6) continue;
    }
    auto const end = test::error_of<stalled>([&] {
      c.all_reduce(std::span(data)); // rank 1 may find that all data has come, and end it
      c.barrier();
    });
    CHECK(end.id == "E-comm-021");
    if (c.rank() == 0) {
      CHECK(end.says("gave up all_reduce (sum, rank_order) of 9 fp32 at mpi.cpp:"));
      CHECK(end.says("it waited for rank 1 (it is in no call that waits)"));
    }
    CHECK_THROWS_AS(c.barrier(), peer_failed);
  }
  meet();
  {
    comm::mpi c(MPI_COMM_WORLD, {.stall_limit = 0.2});
    std::vector<float> data(9);
    auto const end = test::error_of<stalled>([&] {
      if (c.rank() == 0) c.receive(std::span(data), 1, 4);
      if (c.rank() == 1) c.barrier();
    });
    CHECK(end.id == "E-comm-021");
    if (c.rank() == 0) CHECK(end.says("it waited for rank 1 (it is in barrier at mpi.cpp:"));
    if (c.rank() == 1)
      CHECK(end.says("it waited for rank 0 (it is in receive from rank 1 of 9 fp32 at mpi.cpp:"));
  }
  meet();
}

TEST_CASE("a message shorter than its receive is an error") {
  comm::mpi c(MPI_COMM_WORLD);
  std::vector<float> data(9);
  if (c.rank() == 0) c.send(std::span(data).first(3), 1, 0);
  if (c.rank() == 0) c.send(std::span(data).first(3), 1, 0);
  if (c.rank() == 1) {
    CHECK(test::error_of<collective_mismatch>([&] { c.receive(std::span(data), 0, 0); }).id == "E-comm-013");
    CHECK(test::error_of<collective_mismatch>([&] {
            c.start_receive(std::span(data), 0, 0).wait();
          }).says("got 3"));
  }
  c.barrier();
}

TEST_CASE("a receive abandoned by an exception can no longer write") {
  comm::mpi c(MPI_COMM_WORLD);
  try {
    std::vector<float> data(9);
    auto pending = c.start_receive(std::span(data), 1 - c.rank(), 0);
    throw 1;
  } catch (int) {
  }
  CHECK_THROWS_AS(c.barrier(), peer_failed);
}

int main(int argc, char** argv) {
  comm::mpi_environment environment(argc, argv);
  doctest::Context context(argc, argv);
  int rank = 0;
  MPI_Comm_rank(MPI_COMM_WORLD, &rank);
  if (rank != 0) context.setOption("minimal", true);
  return context.run();
}
