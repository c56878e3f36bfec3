// What each consumer builds, by its own way to the headers.
#if defined(SINGLE_HEADER)
#include <tessera.hpp>
#else
#include <tessera/core/tensor.hpp>
#include <tessera/core/version.hpp>
#if defined(TESSERA_WITH_JSON)
#include <tessera/io/json.hpp>
#endif
#if defined(TESSERA_WITH_MPI)
#include <tessera/comm/mpi.hpp>
#endif
#if defined(TESSERA_WITH_ONEDNN)
#include <tessera/ops/matmul.hpp>
#endif
#endif

int main() {
  tessera::tensor<float, 2> x({2, 3});
  x(1, 2) = 1.5f;
  return x.size() == 6 && x(1, 2) == 1.5f && TESSERA_VERSION >= 100 ? 0 : 1;
}
