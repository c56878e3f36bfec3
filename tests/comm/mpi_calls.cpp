// requires: mpi
// mpi_ranks: 2
// own_main
// Stands between the library and MPI: counts calls, makes each fail, and sees counts beyond 2^31 without
// memory.
#define DOCTEST_CONFIG_IMPLEMENT
#include <doctest/doctest.h>

#include <mpi.h>

#include <string>
#include <vector>

namespace spy {

struct watch {
  std::vector<std::string> calls;
  std::string fails;     // the call that returns an error, once
  bool pretends = false; // nothing reaches MPI
  bool cuda_aware = false;
  long long count = 0; // the last count or offset seen
};
inline watch seen;

/// Whether the call goes on to MPI; otherwise `code` is what it returns.
inline bool goes_on(char const* name, int& code) {
  seen.calls.push_back(name);
  code = seen.fails == name ? MPI_ERR_OTHER : MPI_SUCCESS;
  if (code != MPI_SUCCESS) seen.fails.clear();
  return code == MPI_SUCCESS && !seen.pretends;
}

} // namespace spy

#if defined(MPICH)
extern "C" int MPIX_Query_cuda_support() {
  return spy::seen.cuda_aware ? 1 : 0;
}
#endif
extern "C" int MPI_Barrier(MPI_Comm c) {
  int code;
  return spy::goes_on("MPI_Barrier", code) ? PMPI_Barrier(c) : code;
}
extern "C" int MPI_Bcast_c(void* b, MPI_Count n, MPI_Datatype t, int r, MPI_Comm c) {
  int code;
  spy::seen.count = n;
  return spy::goes_on("MPI_Bcast_c", code) ? PMPI_Bcast_c(b, n, t, r, c) : code;
}
extern "C" int MPI_Reduce_c(void const* a, void* b, MPI_Count n, MPI_Datatype t, MPI_Op o, int r,
                            MPI_Comm c) {
  int code;
  spy::seen.count = n;
  return spy::goes_on("MPI_Reduce_c", code) ? PMPI_Reduce_c(a, b, n, t, o, r, c) : code;
}
extern "C" int MPI_Allreduce_c(void const* a, void* b, MPI_Count n, MPI_Datatype t, MPI_Op o, MPI_Comm c) {
  int code;
  spy::seen.count = n;
  return spy::goes_on("MPI_Allreduce_c", code) ? PMPI_Allreduce_c(a, b, n, t, o, c) : code;
}
extern "C" int MPI_Reduce_scatter_block_c(void const* a, void* b, MPI_Count n, MPI_Datatype t, MPI_Op o,
                                          MPI_Comm c) {
  int code;
  spy::seen.count = n;
  return spy::goes_on("MPI_Reduce_scatter_block_c", code) ? PMPI_Reduce_scatter_block_c(a, b, n, t, o, c)
                                                          : code;
}
extern "C" int MPI_Reduce_scatter_c(void const* a, void* b, MPI_Count const n[], MPI_Datatype t, MPI_Op o,
                                    MPI_Comm c) {
  int code;
  spy::seen.count = n[1];
  return spy::goes_on("MPI_Reduce_scatter_c", code) ? PMPI_Reduce_scatter_c(a, b, n, t, o, c) : code;
}
extern "C" int MPI_Allgather_c(void const* a, MPI_Count m, MPI_Datatype s, void* b, MPI_Count n,
                               MPI_Datatype t, MPI_Comm c) {
  int code;
  spy::seen.count = n;
  return spy::goes_on("MPI_Allgather_c", code) ? PMPI_Allgather_c(a, m, s, b, n, t, c) : code;
}
extern "C" int MPI_Allgatherv_c(void const* a, MPI_Count m, MPI_Datatype s, void* b, MPI_Count const n[],
                                MPI_Aint const d[], MPI_Datatype t, MPI_Comm c) {
  int code;
  spy::seen.count = d[1];
  return spy::goes_on("MPI_Allgatherv_c", code) ? PMPI_Allgatherv_c(a, m, s, b, n, d, t, c) : code;
}
extern "C" int MPI_Gather_c(void const* a, MPI_Count m, MPI_Datatype s, void* b, MPI_Count n, MPI_Datatype t,
                            int r, MPI_Comm c) {
  int code;
  spy::seen.count = n;
  return spy::goes_on("MPI_Gather_c", code) ? PMPI_Gather_c(a, m, s, b, n, t, r, c) : code;
}
extern "C" int MPI_Gatherv_c(void const* a, MPI_Count m, MPI_Datatype s, void* b, MPI_Count const n[],
                             MPI_Aint const d[], MPI_Datatype t, int r, MPI_Comm c) {
  int code;
  spy::seen.count = d[1];
  return spy::goes_on("MPI_Gatherv_c", code) ? PMPI_Gatherv_c(a, m, s, b, n, d, t, r, c) : code;
}
extern "C" int MPI_Scatter_c(void const* a, MPI_Count m, MPI_Datatype s, void* b, MPI_Count n, MPI_Datatype t,
                             int r, MPI_Comm c) {
  int code;
  spy::seen.count = n;
  return spy::goes_on("MPI_Scatter_c", code) ? PMPI_Scatter_c(a, m, s, b, n, t, r, c) : code;
}
extern "C" int MPI_Scatterv_c(void const* a, MPI_Count const n[], MPI_Aint const d[], MPI_Datatype s, void* b,
                              MPI_Count m, MPI_Datatype t, int r, MPI_Comm c) {
  int code;
  spy::seen.count = d[1];
  return spy::goes_on("MPI_Scatterv_c", code) ? PMPI_Scatterv_c(a, n, d, s, b, m, t, r, c) : code;
}
extern "C" int MPI_Alltoall_c(void const* a, MPI_Count m, MPI_Datatype s, void* b, MPI_Count n,
                              MPI_Datatype t, MPI_Comm c) {
  int code;
  spy::seen.count = n;
  return spy::goes_on("MPI_Alltoall_c", code) ? PMPI_Alltoall_c(a, m, s, b, n, t, c) : code;
}
extern "C" int MPI_Alltoallv_c(void const* a, MPI_Count const m[], MPI_Aint const e[], MPI_Datatype s,
                               void* b, MPI_Count const n[], MPI_Aint const d[], MPI_Datatype t, MPI_Comm c) {
  int code;
  spy::seen.count = d[1];
  return spy::goes_on("MPI_Alltoallv_c", code) ? PMPI_Alltoallv_c(a, m, e, s, b, n, d, t, c) : code;
}
extern "C" int MPI_Send_c(void const* b, MPI_Count n, MPI_Datatype t, int r, int tag, MPI_Comm c) {
  int code;
  spy::seen.count = n;
  return spy::goes_on("MPI_Send_c", code) ? PMPI_Send_c(b, n, t, r, tag, c) : code;
}
extern "C" int MPI_Recv_c(void* b, MPI_Count n, MPI_Datatype t, int r, int tag, MPI_Comm c, MPI_Status* s) {
  int code;
  spy::seen.count = n;
  return spy::goes_on("MPI_Recv_c", code) ? PMPI_Recv_c(b, n, t, r, tag, c, s) : code;
}
extern "C" int MPI_Isend_c(void const* b, MPI_Count n, MPI_Datatype t, int r, int tag, MPI_Comm c,
                           MPI_Request* q) {
  int code;
  spy::seen.count = n;
  return spy::goes_on("MPI_Isend_c", code) ? PMPI_Isend_c(b, n, t, r, tag, c, q) : code;
}
extern "C" int MPI_Irecv_c(void* b, MPI_Count n, MPI_Datatype t, int r, int tag, MPI_Comm c, MPI_Request* q) {
  int code;
  spy::seen.count = n;
  return spy::goes_on("MPI_Irecv_c", code) ? PMPI_Irecv_c(b, n, t, r, tag, c, q) : code;
}
extern "C" int MPI_Ibarrier(MPI_Comm c, MPI_Request* q) {
  int code;
  return spy::goes_on("MPI_Ibarrier", code) ? PMPI_Ibarrier(c, q) : code;
}
extern "C" int MPI_Ibcast_c(void* b, MPI_Count n, MPI_Datatype t, int r, MPI_Comm c, MPI_Request* q) {
  int code;
  spy::seen.count = n;
  return spy::goes_on("MPI_Ibcast_c", code) ? PMPI_Ibcast_c(b, n, t, r, c, q) : code;
}
extern "C" int MPI_Iallreduce_c(void const* a, void* b, MPI_Count n, MPI_Datatype t, MPI_Op o, MPI_Comm c,
                                MPI_Request* q) {
  int code;
  spy::seen.count = n;
  return spy::goes_on("MPI_Iallreduce_c", code) ? PMPI_Iallreduce_c(a, b, n, t, o, c, q) : code;
}
extern "C" int MPI_Ireduce_scatter_block_c(void const* a, void* b, MPI_Count n, MPI_Datatype t, MPI_Op o,
                                           MPI_Comm c, MPI_Request* q) {
  int code;
  spy::seen.count = n;
  return spy::goes_on("MPI_Ireduce_scatter_block_c", code) ? PMPI_Ireduce_scatter_block_c(a, b, n, t, o, c, q)
                                                           : code;
}
extern "C" int MPI_Ireduce_scatter_c(void const* a, void* b, MPI_Count const n[], MPI_Datatype t, MPI_Op o,
                                     MPI_Comm c, MPI_Request* q) {
  int code;
  spy::seen.count = n[1];
  return spy::goes_on("MPI_Ireduce_scatter_c", code) ? PMPI_Ireduce_scatter_c(a, b, n, t, o, c, q) : code;
}
extern "C" int MPI_Iallgather_c(void const* a, MPI_Count m, MPI_Datatype s, void* b, MPI_Count n,
                                MPI_Datatype t, MPI_Comm c, MPI_Request* q) {
  int code;
  spy::seen.count = n;
  return spy::goes_on("MPI_Iallgather_c", code) ? PMPI_Iallgather_c(a, m, s, b, n, t, c, q) : code;
}
extern "C" int MPI_Iallgatherv_c(void const* a, MPI_Count m, MPI_Datatype s, void* b, MPI_Count const n[],
                                 MPI_Aint const d[], MPI_Datatype t, MPI_Comm c, MPI_Request* q) {
  int code;
  spy::seen.count = d[1];
  return spy::goes_on("MPI_Iallgatherv_c", code) ? PMPI_Iallgatherv_c(a, m, s, b, n, d, t, c, q) : code;
}
extern "C" int MPI_Ialltoall_c(void const* a, MPI_Count m, MPI_Datatype s, void* b, MPI_Count n,
                               MPI_Datatype t, MPI_Comm c, MPI_Request* q) {
  int code;
  spy::seen.count = n;
  return spy::goes_on("MPI_Ialltoall_c", code) ? PMPI_Ialltoall_c(a, m, s, b, n, t, c, q) : code;
}
extern "C" int MPI_Ialltoallv_c(void const* a, MPI_Count const m[], MPI_Aint const e[], MPI_Datatype s,
                                void* b, MPI_Count const n[], MPI_Aint const d[], MPI_Datatype t, MPI_Comm c,
                                MPI_Request* q) {
  int code;
  spy::seen.count = d[1];
  return spy::goes_on("MPI_Ialltoallv_c", code) ? PMPI_Ialltoallv_c(a, m, e, s, b, n, d, t, c, q) : code;
}
extern "C" int MPI_Wait(MPI_Request* q, MPI_Status* s) {
  int code;
  return spy::goes_on("MPI_Wait", code) ? PMPI_Wait(q, s) : code;
}
extern "C" int MPI_Test(MPI_Request* q, int* f, MPI_Status* s) {
  int code;
  return spy::goes_on("MPI_Test", code) ? PMPI_Test(q, f, s) : code;
}
extern "C" int MPI_Get_count_c(MPI_Status const* s, MPI_Datatype t, MPI_Count* n) {
  int code;
  return spy::goes_on("MPI_Get_count_c", code) ? PMPI_Get_count_c(s, t, n) : code;
}
extern "C" int MPI_Comm_dup(MPI_Comm c, MPI_Comm* d) {
  int code;
  return spy::goes_on("MPI_Comm_dup", code) ? PMPI_Comm_dup(c, d) : code;
}
extern "C" int MPI_Comm_set_errhandler(MPI_Comm c, MPI_Errhandler h) {
  int code;
  return spy::goes_on("MPI_Comm_set_errhandler", code) ? PMPI_Comm_set_errhandler(c, h) : code;
}
extern "C" int MPI_Comm_rank(MPI_Comm c, int* r) {
  int code;
  return spy::goes_on("MPI_Comm_rank", code) ? PMPI_Comm_rank(c, r) : code;
}
extern "C" int MPI_Comm_size(MPI_Comm c, int* r) {
  int code;
  return spy::goes_on("MPI_Comm_size", code) ? PMPI_Comm_size(c, r) : code;
}
extern "C" int MPI_Comm_split(MPI_Comm c, int a, int k, MPI_Comm* d) {
  int code;
  return spy::goes_on("MPI_Comm_split", code) ? PMPI_Comm_split(c, a, k, d) : code;
}
extern "C" int MPI_Op_create_c(MPI_User_function_c* f, int k, MPI_Op* o) {
  int code;
  return spy::goes_on("MPI_Op_create_c", code) ? PMPI_Op_create_c(f, k, o) : code;
}
extern "C" int MPI_Initialized(int* f) {
  int code;
  return spy::goes_on("MPI_Initialized", code) ? PMPI_Initialized(f) : code;
}
extern "C" int MPI_Finalized(int* f) {
  int code;
  return spy::goes_on("MPI_Finalized", code) ? PMPI_Finalized(f) : code;
}
extern "C" int MPI_Query_thread(int* f) {
  int code;
  return spy::goes_on("MPI_Query_thread", code) ? PMPI_Query_thread(f) : code;
}
extern "C" int MPI_Is_thread_main(int* f) {
  int code;
  return spy::goes_on("MPI_Is_thread_main", code) ? PMPI_Is_thread_main(f) : code;
}

#include <tessera/comm/mpi.hpp>

#include "support/thrown.hpp"

using namespace tessera;

namespace {

/// The MPI calls that `f` makes.
template <class F>
std::string calls_of(F f) {
  spy::seen.calls.clear();
  f();
  std::string text;
  for (auto const& call : spy::seen.calls) text += (text.empty() ? "" : " ") + call;
  return text;
}

/// Every call of the library in its plain form: name of the MPI call it makes, and the call.
template <class F>
void for_each_call(comm::mpi& c, index_t n, float* memory, F f) {
  auto const p = index_t{c.size()};
  auto const part = std::span<float>(memory, static_cast<std::size_t>(n));
  auto const whole = std::span<float>(memory + n, static_cast<std::size_t>(n * p));
  auto const other = std::span<float>(memory + n + n * p, static_cast<std::size_t>(n * p));
  std::vector<index_t> const counts(static_cast<std::size_t>(p), n);
  comm::reduce_options const native{.order = comm::summation::native};
  f("MPI_Bcast_c", [&] { c.broadcast(part, 0); });
  f("MPI_Reduce_c", [&] { c.reduce(part, whole.first(part.size()), 0, native); });
  f("MPI_Allreduce_c", [&] { c.all_reduce(part, native); });
  f("MPI_Reduce_scatter_block_c", [&] { c.reduce_scatter(part, whole, native); });
  f("MPI_Reduce_scatter_c", [&] { c.reduce_scatter_v(part, whole, counts, native); });
  f("MPI_Gather_c", [&] { c.gather(whole, part, 0); });
  f("MPI_Gatherv_c", [&] { c.gather_v(whole, part, counts, 0); });
  f("MPI_Scatter_c", [&] { c.scatter(part, whole, 0); });
  f("MPI_Scatterv_c", [&] { c.scatter_v(part, whole, counts, 0); });
  f("MPI_Alltoall_c", [&] { c.all_to_all(other, whole); });
  f("MPI_Alltoallv_c", [&] { c.all_to_all_v(other, counts, whole, counts); });
  auto const mine = whole.subspan(static_cast<std::size_t>(n * c.rank()), part.size()); // in place: no copy
  f("MPI_Allgather_c", [&] { c.all_gather(whole, mine); });
  f("MPI_Allgatherv_c", [&] { c.all_gather_v(whole, mine, counts); });
}

} // namespace

TEST_CASE("each wrapper makes exactly one MPI call, and none of them allocates or asks more") {
  comm::mpi c(MPI_COMM_WORLD);
  std::vector<float> memory(5 * 1024);
  for (int again = 0; again < 2; ++again) {
    for_each_call(c, 1024, memory.data(), [](char const* name, auto call) { CHECK(calls_of(call) == name); });
    CHECK(calls_of([&] { c.barrier(); }) == "MPI_Barrier");
    std::vector<bf16> data(1024);
    CHECK(calls_of([&] { c.all_reduce(std::span(data), {.order = comm::summation::native}); }) ==
          "MPI_Allreduce_c");
    CHECK(calls_of([&] { c.all_reduce(std::span(data)); }) == "MPI_Allgather_c");
    CHECK(calls_of([&] { c.all_reduce(std::span(memory)); }) == "MPI_Alltoallv_c MPI_Allgather_c");
    CHECK(calls_of([&] { c.all_reduce(std::span(memory).first(1031)); }) ==
          "MPI_Alltoallv_c MPI_Iallgatherv_c MPI_Wait");
    CHECK(calls_of([&] { c.start_broadcast(std::span(data), 0).wait(); }) == "MPI_Ibcast_c MPI_Wait");
    std::span<float> const part(memory.data(), 8);
    if (c.rank() == 0) CHECK(calls_of([&] { c.send(part, 1, 0); }) == "MPI_Send_c");
    if (c.rank() == 1) CHECK(calls_of([&] { c.receive(part, 0, 0); }) == "MPI_Recv_c MPI_Get_count_c");
  }
}

TEST_CASE("every MPI call that fails becomes an exception that names it") {
  comm::mpi c(MPI_COMM_WORLD);
  std::vector<float> memory(40);
  auto const fails = [](char const* name, auto call) {
    CAPTURE(name);
    spy::seen.fails = name;
    try {
      call();
      FAIL_CHECK("no exception");
    } catch (library_error const& e) {
      CHECK(std::string(e.id()) == "E-comm-030");
      CHECK(std::string(e.what()).find("failed: ") != std::string::npos);
    }
    CHECK(spy::seen.fails.empty());
  };
  for_each_call(c, 8, memory.data(), fails);
  fails("MPI_Barrier", [&] { c.barrier(); });
  std::span<float> const part(memory.data(), 8), whole(memory.data() + 8, 16);
  std::span<float> const other(memory.data() + 24, 16);
  std::vector<index_t> const counts(2, 8);
  comm::reduce_options const native{.order = comm::summation::native};
  fails("MPI_Ibcast_c", [&] { c.start_broadcast(part, 0).wait(); });
  fails("MPI_Iallreduce_c", [&] { c.start_all_reduce(part, native).wait(); });
  fails("MPI_Ireduce_scatter_block_c", [&] { c.start_reduce_scatter(part, whole, native).wait(); });
  fails("MPI_Ireduce_scatter_c", [&] { c.start_reduce_scatter_v(part, whole, counts, native).wait(); });
  fails("MPI_Iallgather_c", [&] { c.start_all_gather(whole, part).wait(); });
  fails("MPI_Iallgatherv_c", [&] { c.start_all_gather_v(whole, part, counts).wait(); });
  fails("MPI_Ialltoall_c", [&] { c.start_all_to_all(other, whole).wait(); });
  fails("MPI_Ialltoallv_c", [&] { c.start_all_to_all_v(other, counts, whole, counts).wait(); });
  fails("MPI_Isend_c", [&] { c.start_send(part, 0, 0).wait(); });
  fails("MPI_Irecv_c", [&] { c.start_receive(part, 0, 0).wait(); });
  fails("MPI_Send_c", [&] { c.send(part, 0, 0); });
  fails("MPI_Recv_c", [&] { c.receive(part, 0, 0); });
  for (auto const* name :
       {"MPI_Initialized", "MPI_Finalized", "MPI_Query_thread", "MPI_Is_thread_main", "MPI_Comm_dup",
        "MPI_Comm_set_errhandler", "MPI_Comm_rank", "MPI_Comm_size", "MPI_Op_create_c", "MPI_Allgather_c"})
    fails(name, [&] { comm::mpi another(MPI_COMM_WORLD); });
  fails("MPI_Comm_split", [&] { (void)c.split(0, 0); });
  {
    comm::mpi spoiled(MPI_COMM_WORLD);
    std::vector<float> one(1);
    fails("MPI_Wait", [&] { spoiled.start_all_reduce(std::span(one)).wait(); });
  }
  CHECK(c.all_reduce(1) == 2);
}

TEST_CASE("counts and offsets beyond 2^31 reach MPI whole") {
  comm::mpi c(MPI_COMM_WORLD);
  constexpr index_t n = (index_t{1} << 32) + 7;
  auto* const nowhere = reinterpret_cast<float*>(std::uintptr_t{1} << 12); // never read
  spy::seen.pretends = true;
  for_each_call(c, n, nowhere, [&](char const* name, auto call) {
    CAPTURE(name);
    spy::seen.count = 0;
    call();
    CHECK(spy::seen.count == n);
  });
  spy::seen.pretends = false;
  CHECK(c.all_reduce(1) == 2);
}

namespace {

/// Stands for a device's: what is lent there must reach MPI untouched, and be touched by nobody else.
struct far_memory {
  static constexpr bool host_accessible = false;
  static constexpr char const* name = "far";
};

} // namespace

TEST_CASE("messages in device memory go to MPI as they are, if it says that it can take them") {
  auto const id_of = [](auto f) { return test::error_of<config_error>(f).id; };
  comm::mpi plain(MPI_COMM_WORLD);
  std::vector<float> memory(24);
  memory[static_cast<std::size_t>(8 + 8 * plain.rank())] = 5;
  device_span<float, far_memory> const part(memory.data(), 8), whole(memory.data() + 8, 16);
  auto const mine = whole.subspan(static_cast<std::size_t>(8 * plain.rank()), 8);
  comm::reduce_options const native{.order = comm::summation::native};
  CHECK(id_of([&] { plain.broadcast(part, 0); }) == "E-comm-037");
  CHECK(id_of([] { comm::mpi c(MPI_COMM_WORLD, {.device_buffers = true}); }) == "E-comm-036");
#if defined(MPICH)
  spy::seen.cuda_aware = true;
  for (bool const checked : {false, true}) {
    comm::mpi made(MPI_COMM_WORLD, {.checked = checked, .device_buffers = true});
    auto c = made.split(0, made.rank());
    auto const calls = calls_of([&] { c.all_gather(whole, mine); });
    if (!checked) CHECK(calls == "MPI_Allgather_c");
    CHECK((memory[8] == 5 && memory[16] == 5));
    c.all_reduce(whole, native);
    CHECK(memory[8] == 10);
    memory[8] = memory[16] = 5;
    CHECK(id_of([&] { c.all_reduce(part); }) == "E-comm-037");
    device_span<bf16, far_memory> const halves(reinterpret_cast<bf16*>(memory.data()), 8);
    CHECK(id_of([&] { c.all_reduce(halves, native); }) == "E-comm-037");
    if (checked) CHECK(id_of([&] { (void)c.start_broadcast(part, 0); }) == "E-comm-037");
    if (!checked) c.start_broadcast(part, 0).wait();
  }
  spy::seen.cuda_aware = false;
#endif
}

int main(int argc, char** argv) {
  comm::mpi_environment environment(argc, argv);
  doctest::Context context(argc, argv);
  int rank = 0;
  MPI_Comm_rank(MPI_COMM_WORLD, &rank);
  if (rank != 0) context.setOption("minimal", true);
  return context.run();
}
