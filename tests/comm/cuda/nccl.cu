// requires: nccl
// alone
#include <doctest/doctest.h>

#include <atomic>

#include <tessera/comm/cuda/nccl.cuh>
#include <tessera/comm/threads.hpp>
#include <tessera/exec/copy_cuda.hpp>
#include <tessera/exec/graph.hpp>

#include "comm/cuda/device_ranks.hpp"
#include "support/devices.hpp"
#include "support/thrown.hpp"

#if defined(TESSERA_CUDA_EMULATION)
#include <cuda_emulation/control.hpp>
#include <cuda_emulation/nccl.hpp>
#endif

using namespace tessera;

namespace {

using test::ranks_here;

/// body(nccl, its space, the thread rank) on `ranks` threads with a device each.
template <class Body>
void on_devices(int ranks, Body body, comm::nccl_options options = {.stall_limit = 20}) {
  comm::run_threads(ranks,
                    [&](comm::threads& threads) {
                      exec::cuda ex({.device = threads.rank()});
                      comm::nccl c(threads, ex, options);
                      body(c, ex, threads);
                    },
                    {.stall_limit = 20});
}

/// What each rank's body ended with.
template <class Body>
std::vector<test::thrown> ends_of(int ranks, Body body, comm::nccl_options options = {.stall_limit = 20}) {
  std::vector<test::thrown> ends(static_cast<std::size_t>(ranks));
  try {
    on_devices(
        ranks,
        [&](comm::nccl& c, exec::cuda& ex, comm::threads& threads) {
          auto& end = ends[static_cast<std::size_t>(threads.rank())];
          try {
            body(c, ex, threads);
          } catch (error const& e) {
            end = {e.id(), e.what()};
            throw;
          }
        },
        options);
  } catch (std::exception const&) { // looked at through `ends`
  }
  return ends;
}

struct spoiled : std::exception {
  char const* what() const noexcept override { return "spoiled on purpose"; }
};

using device_floats = tensor<float, 1, exec::cuda_memory>;

device_floats filled(exec::cuda& ex, index_t n, float value) {
  device_floats out({n});
  exec::copy(ex, out.span(), std::vector<float>(static_cast<std::size_t>(n), value));
  return out;
}
std::vector<float> fetched(exec::cuda& ex, device_floats& from) {
  std::vector<float> out(static_cast<std::size_t>(from.size()));
  exec::copy(ex, std::span<float>(out), from.span());
  return out;
}

} // namespace

/// The suite runs on host memory and on device memory, with and without a watchdog.
struct model {
  template <class Body>
  static void run(Body body, comm::communicator_options options = {}) {
    auto const most = ranks_here(3);
    for (int ranks = 1; ranks <= most; ++ranks)
      for (bool const on_device : {false, true}) {
        CAPTURE(ranks);
        CAPTURE(on_device);
        on_devices(ranks,
                   [&](comm::nccl& c, exec::cuda& ex, comm::threads&) {
                     test::device_ranks tested(c.split(0, c.rank()), ex, on_device);
                     body(tested);
                   },
                   {.checked = options.checked, .stall_limit = (ranks == 2) == on_device ? 20.0 : 0.0});
      }
  }
};

#include "comm/conformance.hpp"

TEST_CASE("a wait orders the compute stream, in both directions, and the host goes on") {
  on_devices(ranks_here(2),
             [](comm::nccl& c, exec::cuda& ex, comm::threads&) {
               auto const n = static_cast<float>(c.size());
               auto data = filled(ex, 1031, 0.0f);
               auto next = filled(ex, 1031, 1.0f);
               for (int step = 0; step < 3; ++step) {
                 // Put into the stream, not done: the collective has to come after it, and the next copy
                 // after that.
                 exec::copy(ex, data.span(), device_span<float const, exec::cuda_memory>(next.span()));
                 auto sum = c.start_all_reduce(data.span());
                 sum.wait();
                 exec::copy(ex, next.span(), device_span<float const, exec::cuda_memory>(data.span()));
               }
               CHECK(fetched(ex, next) == std::vector<float>(1031, n * n * n));
             },
             {});
}

TEST_CASE("a communicator from an id that was handed over") {
  auto const ranks = ranks_here(2);
  auto const id = comm::nccl_id::make();
  comm::run_threads(ranks, [&](comm::threads& threads) {
    exec::cuda ex({.device = threads.rank()});
    comm::nccl c(id, threads.rank(), threads.size(), ex);
    CHECK(c.rank() == threads.rank());
    CHECK(c.all_reduce(c.rank() + 1) == ranks * (ranks + 1) / 2);
    auto data = filled(ex, 9, 2.0f);
    c.all_reduce(data.span(), {.order = comm::summation::native});
    CHECK(fetched(ex, data) == std::vector<float>(9, 2.0f * static_cast<float>(ranks)));
  });
  CHECK(test::error_of<config_error>([&] {
          exec::cuda ex;
          comm::nccl c(id, 2, 2, ex);
        }).id == "E-comm-104");
}

TEST_CASE("collectives become part of a graph, in either order of summation") {
  for (auto const order : {comm::summation::native, comm::summation::rank_order})
    on_devices(ranks_here(2),
               [&](comm::nccl& c, exec::cuda& ex, comm::threads& threads) {
                 auto data = filled(ex, 1031, 1.0f);
                 auto const step = [&] { c.start_all_reduce(data.span(), {.order = order}).wait(); };
                 step(); // memory is taken before, not inside
                 ex.synchronize();
                 threads.barrier();
                 exec::graph doubled;
                 doubled.capture(ex, step);
                 for (int k = 0; k < 3; ++k) doubled.launch(ex);
                 auto const n = static_cast<float>(c.size());
                 for (auto value : fetched(ex, data)) CHECK(value == n * n * n * n);
                 step();
                 for (auto value : fetched(ex, data)) CHECK(value == n * n * n * n * n);
                 threads.barrier();
               },
               {});
}

TEST_CASE("integers that NCCL cannot add are added in rank order") {
  on_devices(ranks_here(2), [](comm::nccl& c, exec::cuda&, comm::threads&) {
    std::vector<std::int16_t> data(1031, static_cast<std::int16_t>(c.rank() + 1));
    c.all_reduce(std::span(data), {.order = comm::summation::native});
    CHECK(data == std::vector<std::int16_t>(1031, static_cast<std::int16_t>(c.size() * (c.size() + 1) / 2)));
  });
}

TEST_CASE("ranks with different options get an error, not a hang") {
  if (ranks_here(2) < 2) return;
  comm::run_threads(2, [](comm::threads& threads) {
    exec::cuda ex({.device = threads.rank()});
    auto const end = test::error_of<config_error>(
        [&] { comm::nccl c(threads, ex, {.checked = threads.rank() == 1, .stall_limit = 20}); });
    CHECK(end.id == "E-comm-031");
    CHECK(end.says("rank 1 has checked = true"));
  });
}

TEST_CASE("checked ranks that call different collectives all learn both calls") {
  if (ranks_here(2) < 2) return;
  auto const ends = ends_of(2,
                            [](comm::nccl& c, exec::cuda& ex, comm::threads&) {
                              auto data = filled(ex, 12, 1.0f);
                              c.barrier();
                              if (c.rank() == 1)
                                c.all_reduce(data.span().first(11));
                              else
                                c.all_reduce(data.span());
                            },
                            {.checked = true, .stall_limit = 20});
  for (auto const& end : ends) {
    CHECK(end.id == "E-comm-010");
    CHECK(end.says("rank 0 all_reduce (sum, rank_order) of 12 fp32 at nccl.cu:"));
    CHECK(end.says("rank 1 all_reduce (sum, rank_order) of 11 fp32 at nccl.cu:"));
  }
}

TEST_CASE("a checked receive finds that a message has another tag or type") {
  if (ranks_here(2) < 2) return;
  auto const ends = ends_of(2,
                            [](comm::nccl& c, exec::cuda&, comm::threads&) {
                              std::vector<float> data(4);
                              if (c.rank() == 0)
                                c.send(std::span<float const>(data), 1, 7);
                              else
                                c.receive(std::span(data), 0, 8);
                              c.barrier();
                            },
                            {.checked = true, .stall_limit = 20});
  CHECK(ends[1].id == "E-comm-013");
  CHECK(ends[1].says("with tag 8 meets send to rank 1 of 4 fp32"));
}

TEST_CASE("the watchdog names the collective and the ranks that it waits for") {
  if (ranks_here(2) < 2) return;
  std::atomic<bool> over = false;
  auto const ends = ends_of(2,
                            [&](comm::nccl& c, exec::cuda& ex, comm::threads&) {
                              auto data = filled(ex, 12, 1.0f);
                              c.barrier();
                              if (c.rank() == 1) { // busy elsewhere until the other has given up
                                while (!over) std::this_thread::yield();
                                throw spoiled();
                              }
                              try {
                                c.all_reduce(data.span());
                              } catch (...) {
                                over = true;
                                throw;
                              }
                            },
                            {.stall_limit = 0.2});
  CHECK(ends[0].id == "E-comm-021");
  CHECK(ends[0].says("rank 0 of 2 gave up all_reduce (sum, rank_order) of 12 fp32 at nccl.cu:"));
  CHECK(ends[0].says("it waited for rank 1 (it is in no call that waits)"));
}

TEST_CASE("ranks stuck in different collectives learn of each other's, unchecked too") {
  if (ranks_here(2) < 2) return;
  auto const ends = ends_of(2,
                            [&](comm::nccl& c, exec::cuda& ex, comm::threads&) {
                              auto data = filled(ex, 12, 1.0f);
                              if (c.rank() == 0)
                                c.all_reduce(data.span(), {.order = comm::summation::native});
                              else
                                c.receive(data.span(), 0, 3);
                            },
                            {.stall_limit = 0.3});
  int stuck = 0;
  for (auto const& end : ends) stuck += end.id == "E-comm-021" || end.id == "E-comm-103" ? 1 : 0;
  CHECK(stuck == 2);
  CHECK((ends[0].says("rank 1 (it is in receive from rank 0 of 12 fp32") ||
         ends[1].says("rank 0 (it is in all_reduce (sum, native) of 12 fp32")));
}

TEST_CASE("a rank that has left is no trouble for messages between others") {
  if (ranks_here(3) < 3) return;
  on_devices(3, [](comm::nccl& c, exec::cuda&, comm::threads&) {
    std::vector<float> data(5, static_cast<float>(c.rank()));
    c.barrier();
    if (c.rank() == 0) return;
    if (c.rank() == 1) std::this_thread::sleep_for(std::chrono::milliseconds(500));
    if (c.rank() == 1) c.send(std::span<float const>(data), 2, 0);
    if (c.rank() == 2) c.receive(std::span(data), 1, 0);
    CHECK(data == std::vector<float>(5, 1.0f));
  });
}

TEST_CASE("a rank that fails wakes the others, and its own exception comes out") {
  if (ranks_here(3) < 2) return;
  std::atomic<int> woken = 0;
  CHECK_THROWS_AS(on_devices(ranks_here(3),
                             [&](comm::nccl& c, exec::cuda& ex, comm::threads&) {
                               auto data = filled(ex, 5003, 1.0f);
                               c.barrier();
                               if (c.rank() == 1) throw spoiled();
                               try {
                                 c.start_all_reduce(data.span()).wait();
                               } catch (peer_failed const& e) {
                                 CHECK(std::string(e.id()) == "E-comm-103");
                                 ++woken;
                                 throw;
                               }
                             }),
                  spoiled);
  CHECK(woken == ranks_here(3) - 1);
}

TEST_CASE("a request that an exception abandons leaves a communicator that says so") {
  on_devices(1, [](comm::nccl& c, exec::cuda& ex, comm::threads&) {
    auto data = filled(ex, 12, 1.0f);
    try {
      auto pending = c.start_all_reduce(data.span());
      throw spoiled();
    } catch (spoiled const&) { // and on we go
    }
    CHECK(test::error_of<peer_failed>([&] { c.barrier(); }).id == "E-comm-016");
  });
}

#if defined(TESSERA_CUDA_EMULATION)

TEST_CASE("two ranks on one device are refused, in NCCL's words") {
  ranks_here(2);
  comm::run_threads(2, [](comm::threads& threads) {
    exec::cuda ex({.device = 0});
    auto const end = test::error_of<library_error>([&] { comm::nccl c(threads, ex); });
    CHECK(end.id == "E-comm-101");
    CHECK(end.says("Duplicate GPU detected"));
  });
}

TEST_CASE("an error that comes up while NCCL works is an exception of the next call") {
  on_devices(ranks_here(2), [](comm::nccl& c, exec::cuda& ex, comm::threads& threads) {
    auto data = filled(ex, 12, 1.0f);
    c.all_reduce(data.span());
    threads.barrier();
    if (c.rank() == 0) cuda_emulation::set_nccl_async_error(0, ncclRemoteError);
    if (c.rank() == 0) {
      CHECK(test::error_of<peer_failed>([&] { c.all_reduce(data.span()); }).id == "E-comm-102");
      cuda_emulation::set_nccl_async_error(0, ncclSuccess);
      CHECK(test::error_of<peer_failed>([&] { c.all_reduce(data.span()); }).id == "E-comm-016");
    }
    threads.barrier();
  });
}

TEST_CASE("every call of CUDA and NCCL that fails is an exception") {
  for (std::int64_t after = 0; after < 400; ++after) {
    bool failed = false, reached = false;
    try {
      on_devices(1,
                 [&](comm::nccl& c, exec::cuda& ex, comm::threads&) {
                   auto data = filled(ex, 1031, 1.0f);
                   std::vector<std::int32_t> numbers(700, 1);
                   cuda_emulation::fail_call(after, cudaErrorUnknown);
                   c.start_all_reduce(data.span(), {.order = comm::summation::native}).wait();
                   c.all_reduce(std::span(numbers));
                   c.barrier();
                   auto again = data.span();
                   c.all_gather(again, again);
                   reached = true;
                   cuda_emulation::fail_call(-1, cudaSuccess);
                 },
                 {.checked = after % 2 == 1, .stall_limit = 20});
    } catch (library_error const&) {
      failed = true;
    }
    cuda_emulation::fail_call(-1, cudaSuccess);
    CHECK(failed != reached);
    if (reached) {
      CHECK(after > 20);
      break;
    }
  }
}

TEST_CASE("nothing is left of communicators, and no buffer was read that nobody wrote") {
  CHECK(cuda_emulation::nccl_communicators() == 0);
  CHECK(cuda_emulation::faults().empty());
}

#endif
