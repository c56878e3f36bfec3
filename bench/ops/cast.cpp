#include <tessera/ops/cast.hpp>

#include "support/operation.hpp"

using namespace tessera;
using catalog::shape;

int main(int argc, char** argv) {
  bench::memory_bound("cast", []<class T>(exec::host& ex, shape s) {
    index_t const n = s.rows * s.width;
    return [&ex, out = tensor<T, 1>({n}), in = bench::drawn<T, 1>({n}, 1)]() mutable {
      ops::cast(ex, out.view(), in.view());
    };
  });
  benchmark::Initialize(&argc, argv);
  if (benchmark::ReportUnrecognizedArguments(argc, argv)) return 2;
  benchmark::RunSpecifiedBenchmarks();
}
