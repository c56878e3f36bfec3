#include <tessera/exec/launch.cuh>

#include <doctest/doctest.h>

#include <tessera/exec/copy_cuda.hpp>

#include "support/thrown.hpp"

using namespace tessera;
using test::error_of;

namespace {
template <class T>
__global__ void number_blocks(T* out, T start) {
  if (threadIdx.x == 0) out[(blockIdx.z * gridDim.y + blockIdx.y) * gridDim.x + blockIdx.x] = start++;
  if (threadIdx.x == 1 && start == T{}) out[0] = start;
}

/// The sum over the block through as much dynamic shared memory as there are threads times `each` floats.
__global__ void shared_sum(float* out, int each) {
  auto* const memory = exec::dynamic_shared<float>();
  auto const self = static_cast<int>(threadIdx.x), threads = static_cast<int>(blockDim.x);
  for (int i = 0; i < each; ++i) memory[i * threads + self] = 1.0f;
  __syncthreads();
  if (self == 0) {
    auto sum = 0.0f;
    for (int i = 0; i < each * threads; ++i) sum += memory[i];
    out[0] = sum;
  }
}
} // namespace

TEST_CASE("a grid of three dimensions starts every block once, and converts arguments") {
  exec::cuda ex;
  tensor<index_t, 1, exec::cuda_memory> out({2 * 3 * 4});
  exec::launch(ex, {.grid = exec::grid_of(2, 3, 4), .block = dim3(32)}, number_blocks<index_t>, out.data(),
               7);
  tensor<index_t, 1> back({24});
  exec::copy(ex, back.view(), out.view());
  for (auto v : back.span()) CHECK(v == 7);
}

TEST_CASE("a grid without blocks starts nothing") {
  exec::cuda ex;
  exec::launch(ex, {.grid = exec::grid_of(0), .block = dim3(32)}, number_blocks<int>, nullptr, 1);
  exec::launch(ex, {.grid = exec::grid_of(3, 0), .block = dim3(32)}, number_blocks<int>, nullptr, 1);
  ex.synchronize();
}

TEST_CASE("dynamic shared memory is there in the size asked for, also above 48 KiB") {
  exec::cuda ex;
  for (int each : {1, 3, 100}) {
    tensor<float, 1, exec::cuda_memory> out({1});
    auto const bytes = static_cast<std::size_t>(each) * 160 * sizeof(float);
    exec::launch(ex, {.grid = exec::grid_of(1), .block = dim3(160), .shared_bytes = bytes}, shared_sum,
                 out.data(), each);
    tensor<float, 1> back({1});
    exec::copy(ex, back.view(), out.view());
    CHECK(back(0) == static_cast<float>(each * 160));
  }
}

TEST_CASE("a launch that the device cannot do is an error that names the call") {
  exec::cuda ex;
  tensor<float, 1, exec::cuda_memory> out({1});
  auto const threads = error_of<library_error>(
      [&] { exec::launch(ex, {.grid = exec::grid_of(1), .block = dim3(2048)}, shared_sum, out.data(), 0); });
  CHECK(threads.id == "E-exec-101");
  CHECK(threads.says("cudaLaunchKernelEx"));
  auto const memory = error_of<library_error>([&] {
    exec::launch(ex, {.grid = exec::grid_of(1), .block = dim3(32), .shared_bytes = std::size_t{1} << 24},
                 shared_sum, out.data(), 0);
  });
  CHECK(memory.id == "E-exec-101");
  ex.synchronize();
}

TEST_CASE("grids are sized by the work and the device, and checked") {
  exec::cuda ex;
  auto const most = static_cast<unsigned>(ex.multiprocessors() * 8);
  CHECK(exec::grid_for(ex, 0, 256).x == 0);
  CHECK(exec::grid_for(ex, 1, 256).x == 1);
  CHECK(exec::grid_for(ex, 257, 256).x == 2);
  CHECK(exec::grid_for(ex, index_t{1} << 40, 256).x == most);
  CHECK(error_of<size_error>([] { (void)exec::grid_of(index_t{1} << 33); }).id == "E-core-003");
  alignas(16) float data[8];
  CHECK(exec::aligned16(data));
  CHECK(!exec::aligned16(data + 1));
  CHECK(exec::aligned16(data, 4));
  CHECK(!exec::aligned16(data, 5));
}
