// Each call of a run of the library is made to fail in turn, and each time somebody hears of it.
#include <doctest/doctest.h>

#include <cuda_emulation/control.hpp>

#include <tessera/exec/copy_cuda.hpp>
#include <tessera/exec/event.hpp>
#include <tessera/exec/graph.hpp>
#include <tessera/ops/cuda/layer_norm.cuh>
#include <tessera/ops/cuda/linear.cuh>
#include <tessera/ops/cuda/reduce.cuh>

using namespace tessera;

namespace {

/// Something of everything that calls CUDA; returns the number of calls before anything is given back.
std::int64_t use_the_library() {
  auto const before = cuda_emulation::calls();
  exec::cuda ex;
  tensor<float, 2, exec::cuda_memory> in({3, 8}), weight({5, 8}), normed({3, 8}), out({3, 5});
  tensor<float, 1, exec::cuda_memory> gain({8}), bias({8}), mean({3}), deviation({3});
  exec::staged<float, 2, exec::cuda> staged(ex, {3, 8});
  staged.upload(ex);
  exec::copy(ex, in.view(), staged.device());
  auto const step = [&] {
    ops::layer_norm(ex, normed.view(), mean.view(), deviation.view(), in.view(), gain.view(), bias.view());
    ops::linear(ex, out.view(), normed.view(), weight.view(), {});
  };
  step();
  (void)ops::sum(ex, view<float const, 1, exec::cuda_memory>(out.data(), {15}));
  exec::event event(ex, {.timed = true}), later(ex, {.timed = true});
  event.record(ex);
  exec::graph graph;
  graph.capture(ex, step);
  graph.launch(ex);
  later.wait_in(ex);
  later.record(ex);
  while (!later.passed()) {
  }
  event.wait();
  (void)later.milliseconds_since(event);
  staged.download(ex);
  ex.synchronize();
  return cuda_emulation::calls() - before;
}

} // namespace

TEST_CASE("Whichever call of CUDA fails, the library throws, and leaves no error unlooked at") {
  auto const calls = use_the_library();
  CHECK(cuda_emulation::take_unchecked_errors().empty());
  REQUIRE(calls > 50);
  for (std::int64_t n = 0; n < calls; ++n) {
    CAPTURE(n);
    cuda_emulation::fail_call(n, cudaErrorUnknown);
    CHECK_THROWS_AS(use_the_library(), tessera::error);
    cuda_emulation::fail_call(-1, cudaSuccess);
    auto const unchecked = cuda_emulation::take_unchecked_errors();
    CHECK(unchecked.empty());
    for (auto const& name : unchecked) MESSAGE(name);
  }
  CHECK(cudaPeekAtLastError() == cudaSuccess);
}
