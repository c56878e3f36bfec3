#include <tessera/exec/graph.hpp>

#include <utility>

#include <doctest/doctest.h>

#include <tessera/exec/copy_cuda.hpp>
#include <tessera/exec/launch.cuh>

#include "support/thrown.hpp"

using namespace tessera;
using test::error_of;

namespace {
__global__ void add_to(float* x, float const* y, int n) {
  auto const i = static_cast<int>(blockIdx.x * blockDim.x + threadIdx.x);
  if (i < n) x[i] += y[i];
}
float first_of(exec::cuda& ex, tensor<float, 1, exec::cuda_memory> const& x) {
  tensor<float, 1> back({x.size()});
  exec::copy(ex, back.view(), x.view());
  return back(0);
}
} // namespace

TEST_CASE("what is captured runs at each launch, and not before") {
  exec::cuda ex;
  tensor<float, 1, exec::cuda_memory> sum({100});
  exec::staged<float, 1, exec::cuda> term(ex, {100});
  for (auto& v : term.host().span()) v = 1.0f;
  exec::graph step;
  CHECK(!step.captured());
  step.capture(ex, [&] {
    CHECK(ex.capturing());
    auto const there = term.upload(ex);
    for (int i = 0; i < 2; ++i)
      exec::launch(ex, {.grid = exec::grid_of(4), .block = dim3(32)}, add_to, sum.data(), there.data(), 100);
  });
  CHECK(!ex.capturing());
  CHECK(step.captured());
  CHECK(first_of(ex, sum) == 0.0f);
  step.launch(ex);
  step.launch(ex);
  CHECK(first_of(ex, sum) == 4.0f);
  for (auto& v : term.host().span()) v = 10.0f; // read anew by each launch
  step.launch(ex);
  CHECK(first_of(ex, sum) == 24.0f);
  exec::graph moved(std::move(step));
  moved.launch(ex);
  CHECK(first_of(ex, sum) == 44.0f);
  exec::zero(ex, sum.span());
  moved.capture(ex, [&] { exec::zero(ex, sum.span()); });
  moved.launch(ex);
  CHECK(first_of(ex, sum) == 0.0f);
}

TEST_CASE("what cannot be captured throws, and the stream can be used again") {
  exec::cuda ex;
  tensor<float, 1, exec::cuda_memory> x({10});
  tensor<float, 1> host({10});
  exec::graph step;
  auto const waiting = error_of<library_error>([&] { step.capture(ex, [&] { ex.synchronize(); }); });
  CHECK(waiting.id == "E-exec-101");
  CHECK(waiting.says("cudaStreamSynchronize"));
  CHECK(!step.captured());
  CHECK(error_of<library_error>([&] {
          step.capture(ex, [&] { exec::copy(ex, host.view(), x.view()); });
        }).id == "E-exec-101");
  CHECK(!ex.capturing());
  ex.synchronize();
  step.capture(ex, [&] { exec::zero(ex, x.span()); });
  step.launch(ex);
  ex.synchronize();
}

TEST_CASE("an exception of the body ends the capture and goes on") {
  exec::cuda ex;
  exec::graph step;
  CHECK(error_of<size_error>([&] {
          step.capture(ex, [&] { throw size_error("E-core-001", site::here(), "for the test"); });
        }).id == "E-core-001");
  CHECK(!ex.capturing());
  ex.synchronize();
}

TEST_CASE("a graph that holds nothing is not launched") {
  exec::cuda ex;
  exec::graph step;
  CHECK(error_of<config_error>([&] { step.launch(ex); }).id == "E-exec-106");
}
