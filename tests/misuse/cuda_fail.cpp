// include: tests/cuda_emulation/include
// Device memory and host memory do not mix: not in operations, copies, spans or messages between ranks, and
// the host does not reach elements on a device.
#define TESSERA_WITH_CUDA
#include <vector>

#include <tessera/comm/self.hpp>
#include <tessera/exec/copy_cuda.hpp>
#include <tessera/exec/host.hpp>
#include <tessera/ops/add.hpp>
#include <tessera/optim/adamw.hpp>

using namespace tessera;

void right(exec::cuda& ex, exec::host& host) {
  tensor<float, 1> x({4});
  tensor<float, 1, exec::cuda_memory> y({4});
  exec::copy(ex, y.span(), x.span());
  exec::copy(ex, x.view(), y.view());
  ops::add(host, x.view(), x.view(), x.view());
  x(0) = 1.0f;
#if MISUSE == 1
  ops::add(ex, x.view(), x.view(),
           x.view()); // expect-error: (cuda::memory|cuda_memory).*host_memory|host_memory.*cuda_memory
#elif MISUSE == 2
  ops::add(host, y.view(), y.view(),
           y.view()); // expect-error: cuda_memory
#elif MISUSE == 3
  y(0) = 1.0f; // expect-error: host_accessible
#elif MISUSE == 4
  y.view()(0) = 1.0f; // expect-error: host_accessible
#elif MISUSE == 5
  y.span()[0] = 1.0f; // expect-error: operator\[\]|subscript operator
#elif MISUSE == 6
  exec::copy(host, x.span(), y.span()); // expect-error: device_span
#elif MISUSE == 7
  exec::copy(ex, x.view(), x.view()); // expect-error: cuda_memory
#elif MISUSE == 8
  std::span<float> const reached = y.span(); // expect-error: device_span.*span<float>
#elif MISUSE == 9
  comm::self rank;
  rank.all_reduce(y.span()); // expect-error: device_span
#elif MISUSE == 10
  optim::adamw<exec::cuda, float> o(ex, 4, {}, {});
  o.step(ex, x.span(), y.span(), {}); // expect-error: device_span|memory_span
#elif MISUSE == 11
  exec::cuda second = ex; // expect-error: deleted
#endif
}

int main() {}
