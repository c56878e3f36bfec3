#include <tessera/ops/add.hpp>

#include "support/operation.hpp"

using namespace tessera;
using catalog::shape;

int main(int argc, char** argv) {
  bench::memory_bound("add", []<class T>(exec::host& ex, shape s) {
    index_t const n = s.rows * s.width;
    return [&ex, out = tensor<T, 1>({n}), a = bench::drawn<T, 1>({n}, 1),
            b = bench::drawn<T, 1>({n}, 2)]() mutable { ops::add(ex, out.view(), a, b); };
  });
  benchmark::Initialize(&argc, argv);
  if (benchmark::ReportUnrecognizedArguments(argc, argv)) return 2;
  benchmark::RunSpecifiedBenchmarks();
}
