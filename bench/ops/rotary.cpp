#include <tessera/ops/rotary.hpp>

#include "support/operation.hpp"

using namespace tessera;
using catalog::shape;

int main(int argc, char** argv) {
  bench::memory_bound("rotary", []<class T>(exec::host& ex, shape s) {
    return [&ex, x = bench::drawn<T, 4>({1, s.rows, s.width / 64, 64}, 1)]() mutable {
      ops::rotary(ex, x.view());
    };
  });
  benchmark::Initialize(&argc, argv);
  if (benchmark::ReportUnrecognizedArguments(argc, argv)) return 2;
  benchmark::RunSpecifiedBenchmarks();
}
