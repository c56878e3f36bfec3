#include <tessera/exec/cuda.hpp>

#include <string>
#include <vector>

#include <doctest/doctest.h>

#include <tessera/exec/copy_cuda.hpp>
#include <tessera/exec/launch.cuh>
#include <tessera/exec/range.hpp>
#include <tessera/exec/scratch.hpp>

#include "support/thrown.hpp"

#if defined(TESSERA_CUDA_EMULATION)
#include <cuda_emulation/control.hpp>
#endif

using namespace tessera;
using test::error_of;

namespace {

struct first;
struct second;

/// What was destroyed, in order.
struct trace {
  std::vector<std::string>* order = nullptr;
};
struct early : trace {
  ~early() {
    if (order != nullptr) order->push_back("early");
  }
};
/// Made from the space, of which it asks another handle.
struct late : trace {
  explicit late(exec::cuda& ex) : used(&ex.handle<early>()), stream(ex.stream()) {}
  ~late() {
    if (order != nullptr) order->push_back("late");
  }
  early* used;
  cudaStream_t stream;
};

struct counted_check final : exec::late_check {
  void look(site where) override {
    ++looks;
    if (bad) throw numeric_error("E-exec-199", where, "for the test");
  }
  int looks = 0;
  bool bad = false;
};

__global__ void add_one(int* x, int n) {
  auto const i = static_cast<int>(blockIdx.x * blockDim.x + threadIdx.x);
  if (i < n) x[i] += 1;
}

} // namespace

TEST_CASE("a space is on its device, in a stream of its own") {
  exec::cuda ex;
  CHECK(ex.device() == 0);
  CHECK(ex.stream() != nullptr);
  CHECK(ex.multiprocessors() > 0);
  CHECK(ex.workspace_bytes() == 32 << 20);
  CHECK(!ex.capturing());
  exec::cuda other;
  CHECK(other.stream() != ex.stream());
  static_assert(exec::cuda_space<exec::cuda> && !exec::host_space<exec::cuda>);
}

TEST_CASE("a stream of the host application is used and not destroyed") {
  exec::cuda owner;
  for (int i = 0; i < 2; ++i) {
    exec::cuda ex({.stream = owner.stream()});
    CHECK(ex.stream() == owner.stream());
    ex.synchronize();
  }
  owner.synchronize();
}

TEST_CASE("a device that is not there is refused in plain words") {
  auto const devices = exec::cuda_devices();
  CHECK(devices > 0);
  for (int device : {-1, devices, devices + 3}) {
    auto const error = error_of<config_error>([&] { exec::cuda ex({.device = device}); });
    CHECK(error.id == "E-exec-103");
    CHECK(error.says("device " + std::to_string(device) + " of " + std::to_string(devices)));
  }
  CHECK(error_of<config_error>([] { exec::cuda ex({.workspace_bytes = -1}); }).id == "E-exec-104");
}

TEST_CASE("handles are made once, and destroyed before what they use") {
  std::vector<std::string> order;
  {
    exec::cuda ex;
    auto& handle = ex.handle<late>();
    CHECK(&ex.handle<late>() == &handle);
    CHECK(handle.stream == ex.stream());
    CHECK(handle.used == &ex.handle<early>());
    handle.order = handle.used->order = &order;
  }
  CHECK(order == std::vector<std::string>{"late", "early"});
}

TEST_CASE("scratch memory of the device grows, stays, and is counted") {
  exec::cuda ex;
  auto take = [&](index_t n) { return ex.handle<exec::scratch<first, exec::cuda_memory>>().take<float>(n); };
  auto* const memory = take(100);
  CHECK(take(50) == memory);
  CHECK(ex.scratch().current() == 400);
  CHECK((ex.handle<exec::scratch<second, exec::cuda_memory>>().take<float>(1)) != memory);
  auto const allocations = ex.scratch().allocations();
  take(100);
  CHECK(ex.scratch().allocations() == allocations);
}

TEST_CASE("every synchronize looks at what kernels may have found wrong") {
  exec::cuda ex;
  auto& check = ex.handle<counted_check>();
  ex.watch(check);
  ex.synchronize();
  ex.synchronize();
  CHECK(check.looks == 2);
  check.bad = true;
  CHECK(error_of<numeric_error>([&] { ex.synchronize(); }).id == "E-exec-199");
  check.bad = false;
}

TEST_CASE("notes are kept once") {
  exec::cuda ex;
  ex.note("a");
  ex.note("b");
  ex.note("a");
  CHECK(ex.notes() == std::vector<std::string>{"a", "b"});
}

TEST_CASE("spaces work side by side, each in the order of its own stream") {
  exec::cuda a, b;
  tensor<int, 1, exec::cuda_memory> x({100}), y({100});
  for (int i = 0; i < 3; ++i) {
    exec::launch(a, {.grid = exec::grid_of(4), .block = dim3(32)}, add_one, x.data(), 100);
    exec::launch(b, {.grid = exec::grid_of(4), .block = dim3(32)}, add_one, y.data(), 100);
  }
  tensor<int, 1> from_a({100}), from_b({100});
  exec::copy(a, from_a.view(), x.view());
  exec::copy(b, from_b.view(), y.view());
  for (index_t i = 0; i < 100; ++i) CHECK((from_a(i) == 3 && from_b(i) == 3));
}

#if defined(TESSERA_CUDA_EMULATION)
TEST_CASE("ranges are told to the profiler, and closed") {
  exec::cuda ex;
  {
    exec::range const outer(ex, "step");
    exec::range const inner(ex, "forward");
    CHECK(cuda_emulation::open_ranges() == 2);
  }
  CHECK(cuda_emulation::open_ranges() == 0);
}

TEST_CASE("a machine without a device says so") {
  cuda_emulation::set_device_count(0);
  auto const error = error_of<config_error>([] { exec::cuda ex; });
  auto const devices = exec::cuda_devices();
  cuda_emulation::set_device_count(2);
  CHECK(error.id == "E-exec-102");
  CHECK(error.says("no CUDA device"));
  CHECK(devices == 0);
  (void)cuda_emulation::take_unchecked_errors();
}

TEST_CASE("an error of any call is named, whichever call it is") {
  auto const work = [] {
    exec::cuda ex({.device = 1});
    tensor<int, 1, exec::cuda_memory> x({10});
    exec::launch(ex, {.grid = exec::grid_of(1), .block = dim3(32)}, add_one, x.data(), 10);
    tensor<int, 1> back({10});
    exec::copy(ex, back.view(), x.view());
    ex.synchronize();
  };
  auto const before = cuda_emulation::calls();
  work();
  auto const calls = cuda_emulation::calls() - before;
  CHECK(calls > 10);
  auto named = 0;
  for (std::int64_t i = 0; i < calls; ++i) {
    cuda_emulation::fail_call(i, cudaErrorUnknown);
    try {
      work();
    } catch (library_error const& caught) {
      CHECK(std::string(caught.id()) == "E-exec-101");
      CHECK(std::string(caught.what()).find("cuda") == 0);
      CHECK(std::string(caught.what()).find("cudaErrorUnknown") != std::string::npos);
      ++named;
    } catch (config_error const& caught) {
      CHECK(std::string(caught.id()) == "E-exec-102"); // counting the devices
      ++named;
    }
    cuda_emulation::fail_call(-1, cudaSuccess);
    CHECK(cuda_emulation::take_unchecked_errors().empty());
  }
  // All but those of destructors.
  CHECK(named >= 10);
}
#endif
