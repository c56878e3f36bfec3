#include <tessera/ops/matmul.hpp>

#include "support/operation.hpp"

using namespace tessera;
using catalog::shape;

int main(int argc, char** argv) {
  bench::product_bound("matmul", {{1024, 768, 768}}, []<class T>(exec::host& ex, shape s) {
    return [&ex, c = tensor<T, 2>({s.rows, s.width}), a = bench::drawn<T, 2>({s.rows, s.depth}, 1),
            b = bench::drawn<T, 2>({s.depth, s.width}, 2)]() mutable {
      ops::matmul(ex, c.view(), a.view(), b.view());
    };
  });
  bench::product_bound("matmul_batched", {{1024, 768, 768}}, []<class T>(exec::host& ex, shape s) {
    return
        [&ex, c = tensor<T, 3>({4, s.rows / 4, s.width}), a = bench::drawn<T, 3>({4, s.rows / 4, s.depth}, 1),
         b = bench::drawn<T, 3>({4, s.depth, s.width}, 2)]() mutable {
          ops::matmul_batched(ex, c.view(), a.view(), b.view());
        };
  });
  benchmark::Initialize(&argc, argv);
  if (benchmark::ReportUnrecognizedArguments(argc, argv)) return 2;
  benchmark::RunSpecifiedBenchmarks();
}
