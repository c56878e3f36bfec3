#include <tessera/exec/device.cuh>

#include <doctest/doctest.h>

#include <tessera/exec/copy_cuda.hpp>
#include <tessera/exec/launch.cuh>

#include "support/reference.hpp"

using namespace tessera;

namespace {
/// out = in, 16 bytes a thread, by way of shared memory, each vector turned round.
template <class T>
__global__ void reverse_vectors(T* out, T const* in) {
  auto* const memory = exec::dynamic_shared<T>();
  constexpr int n = exec::vector16<T>::count;
  auto const at = static_cast<int>(threadIdx.x) * n;
  auto v = exec::load16(in + at);
  for (int i = 0; i < n / 2; ++i) {
    auto const held = v[i];
    v[i] = v[n - 1 - i];
    v[n - 1 - i] = held;
  }
  exec::store16(memory + at, v);
  __syncthreads();
  exec::store16(out + at, exec::load16(memory + at));
}
} // namespace

TEST_CASE_TEMPLATE("sixteen bytes are moved at once, in global and in shared memory", T, float, bf16, fp16,
                   std::int32_t, double) {
  exec::cuda ex;
  constexpr int threads = 33, n = exec::vector16<T>::count;
  static_assert(sizeof(exec::vector16<T>) == 16 && alignof(exec::vector16<T>) == 16);
  tensor<T, 1> in({threads * n}), back({threads * n});
  for (index_t i = 0; i < in.size(); ++i) in(i) = T(static_cast<float>(i));
  tensor<T, 1, exec::cuda_memory> x({threads * n}), y({threads * n});
  exec::copy(ex, x.view(), in.view());
  exec::launch(ex, {.grid = exec::grid_of(1), .block = dim3(threads), .shared_bytes = threads * 16},
               reverse_vectors<T>, y.data(), x.data());
  exec::copy(ex, back.view(), y.view());
  for (int t = 0; t < threads; ++t)
    for (int i = 0; i < n; ++i)
      CHECK(static_cast<float>(back(t * n + i)) == static_cast<float>(in(t * n + n - 1 - i)));
}
