#include <tessera/exec/event.hpp>

#include <utility>

#include <doctest/doctest.h>

#include <tessera/exec/copy_cuda.hpp>
#include <tessera/exec/launch.cuh>

using namespace tessera;

namespace {
__global__ void set_all(int* x, int n, int value) {
  auto const i = static_cast<int>(blockIdx.x * blockDim.x + threadIdx.x);
  if (i < n) x[i] = value;
}
__global__ void copy_all(int* y, int const* x, int n) {
  auto const i = static_cast<int>(blockIdx.x * blockDim.x + threadIdx.x);
  if (i < n) y[i] = x[i];
}
} // namespace

TEST_CASE("a stream that waits for an event sees what was done before it") {
  exec::cuda first, second;
  tensor<int, 1, exec::cuda_memory> x({1000}), y({1000});
  exec::event written(first), read(first);
  for (int round = 1; round < 4; ++round) {
    read.wait_in(first); // nothing to wait for in the first round
    exec::launch(first, {.grid = exec::grid_of(8), .block = dim3(128)}, set_all, x.data(), 1000, round);
    written.record(first);
    written.wait_in(second);
    exec::launch(second, {.grid = exec::grid_of(8), .block = dim3(128)}, copy_all, y.data(), x.data(), 1000);
    read.record(second);
    tensor<int, 1> back({1000});
    exec::copy(second, back.view(), y.view());
    CHECK((back(0) == round && back(999) == round));
  }
}

TEST_CASE("the host waits for an event, and asks whether it has passed") {
  exec::cuda ex;
  exec::event done(ex, {.timed = true}), start(ex, {.timed = true});
  CHECK(done.passed());
  tensor<int, 1, exec::cuda_memory> x({10});
  start.record(ex);
  exec::launch(ex, {.grid = exec::grid_of(1), .block = dim3(32)}, set_all, x.data(), 10, 1);
  done.record(ex);
  done.wait();
  CHECK(done.passed());
  CHECK(done.milliseconds_since(start) >= 0);
}

TEST_CASE("an event moves") {
  exec::cuda ex;
  exec::event a(ex), b;
  auto* const native = a.native();
  b = std::move(a);
  CHECK(b.native() == native);
  exec::event const c(std::move(b));
  CHECK(c.native() == native);
  CHECK(b.native() == nullptr);
}
