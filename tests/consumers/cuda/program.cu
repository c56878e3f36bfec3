#include <cstdio>
#include <cstring>

#include <tessera/exec/copy_cuda.hpp>
#include <tessera/ops/cuda/scale.cuh>

using namespace tessera;

/// Doubles on a GPU; on a machine without one, is told so.
int main() {
  try {
    exec::cuda ex;
    tensor<float, 1> x({1000});
    for (auto& value : x.span()) value = 3.0f;
    tensor<float, 1, exec::cuda_memory> there({1000});
    exec::copy(ex, there.view(), x.view());
    ops::scale(ex, there.view(), there.view(), 2.0f);
    exec::copy(ex, x.view(), there.view());
    for (auto value : x.span())
      if (value != 6.0f) return 1;
    return 0;
  } catch (config_error const& told) {
    std::puts(told.what());
    return std::strcmp(told.id(), "E-exec-102") == 0 ? 0 : 1;
  }
}
