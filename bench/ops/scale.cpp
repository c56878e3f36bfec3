#include <tessera/ops/scale.hpp>

#include "support/operation.hpp"

using namespace tessera;
using catalog::shape;

int main(int argc, char** argv) {
  bench::memory_bound("scale", []<class T>(exec::host& ex, shape s) {
    index_t const n = s.rows * s.width;
    return [&ex, out = tensor<T, 1>({n}), in = bench::drawn<T, 1>({n}, 1)]() mutable {
      ops::scale(ex, out.view(), in, 0.5f);
    };
  });
  bench::memory_bound("fill", []<class T>(exec::host& ex, shape s) {
    return [&ex, out = tensor<T, 1>({s.rows * s.width})]() mutable { ops::fill(ex, out.view(), 0.5f); };
  });
  benchmark::Initialize(&argc, argv);
  if (benchmark::ReportUnrecognizedArguments(argc, argv)) return 2;
  benchmark::RunSpecifiedBenchmarks();
}
