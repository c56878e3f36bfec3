#include <tessera/exec/cuda_memory.hpp>

#include <doctest/doctest.h>

#include <tessera/core/arena.hpp>
#include <tessera/core/scalar.hpp>
#include <tessera/exec/copy_cuda.hpp>

#include "support/thrown.hpp"

#if defined(TESSERA_CUDA_EMULATION)
#include <cuda_emulation/control.hpp>
#endif

using namespace tessera;
using test::error_of;

static_assert(memory_space<exec::cuda_memory> && memory_space<exec::pinned_memory>);
static_assert(!exec::cuda_memory::host_accessible && exec::pinned_memory::host_accessible);

TEST_CASE("memory of a device begins as zeros, is aligned, and is counted") {
  exec::cuda ex;
  memory_meter meter;
  {
    tensor<float, 2, exec::cuda_memory> x({7, 11}, {&meter, memory_kind::activations});
    CHECK(meter.current(memory_kind::activations) == 308);
    CHECK(reinterpret_cast<std::uintptr_t>(x.data()) % 256 == 0);
    tensor<float, 2> back({7, 11});
    for (auto& v : back.span()) v = 1.0f;
    exec::copy(ex, back.view(), x.view());
    for (auto v : back.span()) CHECK(v == 0.0f);
  }
  CHECK(meter.current() == 0);
}

TEST_CASE("pinned memory is read and written by the host, and begins as zeros") {
  exec::cuda ex;
  tensor<int, 1, exec::pinned_memory> x({100});
  for (auto v : x.span()) CHECK(v == 0);
  x(99) = 3;
  CHECK(x.span()[99] == 3);
}

TEST_CASE("an empty tensor takes nothing") {
  tensor<float, 1, exec::cuda_memory> x({0});
  CHECK(x.data() == nullptr);
  CHECK(x.span().empty());
}

TEST_CASE("an arena of a device hands out its pieces in order") {
  exec::cuda ex;
  arena<exec::cuda_memory> memory(1024);
  auto const mark = memory.mark();
  auto const a = memory.take<bf16, 2>({3, 5});
  auto const b = memory.take<float, 1>({7});
  CHECK(reinterpret_cast<char*>(b.data()) - reinterpret_cast<char*>(a.data()) == 64);
  memory.release(mark);
  CHECK(memory.used() == 0);
}

TEST_CASE("memory that is not to be had is named by its kind, size and purpose") {
  exec::cuda ex;
  memory_meter meter;
  auto const error = error_of<out_of_memory>([&] {
    tensor<float, 1, exec::cuda_memory> x({index_t{1} << 58}, {&meter, memory_kind::optimizer_state});
  });
  CHECK(error.id == "E-core-009");
  CHECK(error.says("CUDA memory for optimizer state"));
  CHECK(error.says("1152921504606846976 bytes"));
  CHECK(meter.current() == 0);
  // Nothing is left behind: what comes next works.
  ex.synchronize();
  tensor<float, 1, exec::cuda_memory> y({10});
}

#if defined(TESSERA_CUDA_EMULATION)
TEST_CASE("memory goes back to the device it came from, whatever is current, and when zeroing it fails") {
  exec::cuda first({.device = 0});
  // Frees are ordered in the stream that takes and gives memory.
  auto const pieces = [] {
    for (int device : {0, 1}) {
      exec::detail::device_scope const on(device);
      exec::cuda_check(cudaDeviceSynchronize(), "cudaDeviceSynchronize");
    }
    return cuda_emulation::pieces_in_use();
  };
  auto const before = pieces();
  {
    exec::cuda second({.device = 1});
    tensor<float, 1, exec::cuda_memory> x({10}); // on device 1, current since it was made
    exec::detail::device_scope const back_to(0);
    CHECK(pieces() == before + 1);
    x = {};
    int current = -1;
    exec::cuda_check(cudaGetDevice(&current), "cudaGetDevice");
    CHECK(current == 0);
    CHECK(pieces() == before);
  }
  // Allocation is two calls; the third zeroes.
  cuda_emulation::fail_call(2, cudaErrorUnknown);
  CHECK(error_of<library_error>([] { tensor<float, 1, exec::cuda_memory> x({10}); }).says("cudaMemsetAsync"));
  cuda_emulation::fail_call(-1, cudaSuccess);
  CHECK(pieces() == before);
  (void)cuda_emulation::take_unchecked_errors();
}
#endif
