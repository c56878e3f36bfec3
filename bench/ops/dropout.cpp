#include <tessera/ops/dropout.hpp>

#include "support/operation.hpp"

using namespace tessera;
using catalog::shape;

namespace {
constexpr ops::dropout_options options{.probability = 0.1f, .rows_per_sample = 64};
}

int main(int argc, char** argv) {
  bench::memory_bound("dropout", []<class T>(exec::host& ex, shape s) {
    return [&ex, out = tensor<T, 2>({s.rows, s.width}),
            in = bench::drawn<T, 2>({s.rows, s.width}, 1)]() mutable {
      ops::dropout(ex, out.view(), in, options);
    };
  });
  bench::memory_bound("dropout_add", []<class T>(exec::host& ex, shape s) {
    return [&ex, out = tensor<T, 2>({s.rows, s.width}), in = bench::drawn<T, 2>({s.rows, s.width}, 1),
            residual = bench::drawn<T, 2>({s.rows, s.width}, 2)]() mutable {
      ops::dropout_add(ex, out.view(), residual, in, options);
    };
  });
  benchmark::Initialize(&argc, argv);
  if (benchmark::ReportUnrecognizedArguments(argc, argv)) return 2;
  benchmark::RunSpecifiedBenchmarks();
}
