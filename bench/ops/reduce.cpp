#include <tessera/ops/reduce.hpp>

#include "support/operation.hpp"

using namespace tessera;
using catalog::shape;

int main(int argc, char** argv) {
  auto const add = [](char const* name, auto reduction) {
    bench::memory_bound(name, [reduction]<class T>(exec::host& ex, shape s) {
      return [&ex, reduction, in = bench::drawn<T, 1>({s.rows * s.width}, 1)]() mutable {
        auto result = reduction(ex, in.view());
        benchmark::DoNotOptimize(result);
      };
    });
  };
  add("sum", [](auto& ex, auto in) { return ops::sum(ex, in); });
  add("sum_of_squares", [](auto& ex, auto in) { return ops::sum_of_squares(ex, in); });
  add("all_finite", [](auto& ex, auto in) { return ops::all_finite(ex, in); });
  benchmark::Initialize(&argc, argv);
  if (benchmark::ReportUnrecognizedArguments(argc, argv)) return 2;
  benchmark::RunSpecifiedBenchmarks();
}
