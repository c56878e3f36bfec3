#include <tessera/ops/gelu.hpp>

#include "support/operation.hpp"

using namespace tessera;
using catalog::shape;

int main(int argc, char** argv) {
  bench::memory_bound("gelu", []<class T>(exec::host& ex, shape s) {
    index_t const n = s.rows * s.width;
    return [&ex, out = tensor<T, 1>({n}), in = bench::drawn<T, 1>({n}, 1)]() mutable {
      ops::gelu(ex, out.view(), in);
    };
  });
  bench::memory_bound("gelu_backward", []<class T>(exec::host& ex, shape s) {
    index_t const n = s.rows * s.width;
    return [&ex, d_in = tensor<T, 1>({n}), d_out = bench::drawn<T, 1>({n}, 2),
            in = bench::drawn<T, 1>({n}, 1)]() mutable { ops::gelu_backward(ex, d_in.view(), d_out, in); };
  });
  benchmark::Initialize(&argc, argv);
  if (benchmark::ReportUnrecognizedArguments(argc, argv)) return 2;
  benchmark::RunSpecifiedBenchmarks();
}
