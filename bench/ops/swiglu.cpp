#include <tessera/ops/swiglu.hpp>

#include "support/operation.hpp"

using namespace tessera;
using catalog::shape;

int main(int argc, char** argv) {
  bench::memory_bound("swiglu", []<class T>(exec::host& ex, shape s) {
    return [&ex, out = tensor<T, 2>({s.rows, s.width}),
            in = bench::drawn<T, 2>({s.rows, 2 * s.width}, 1)]() mutable { ops::swiglu(ex, out.view(), in); };
  });
  bench::memory_bound("swiglu_backward", []<class T>(exec::host& ex, shape s) {
    return [&ex, d_in = tensor<T, 2>({s.rows, 2 * s.width}), d_out = bench::drawn<T, 2>({s.rows, s.width}, 2),
            in = bench::drawn<T, 2>({s.rows, 2 * s.width}, 1)]() mutable {
      ops::swiglu_backward(ex, d_in.view(), d_out, in);
    };
  });
  benchmark::Initialize(&argc, argv);
  if (benchmark::ReportUnrecognizedArguments(argc, argv)) return 2;
  benchmark::RunSpecifiedBenchmarks();
}
