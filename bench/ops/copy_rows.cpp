#include <tessera/ops/copy_rows.hpp>

#include "support/operation.hpp"

using namespace tessera;
using catalog::shape;

int main(int argc, char** argv) {
  // Rows of one head among several, as messages are packed from them.
  static constexpr index_t heads = 12;
  bench::memory_bound("copy_rows", []<class T>(exec::host& ex, shape s) {
    extents<4> const part{1, s.rows, heads / 2, s.width / heads * 2};
    return [&ex, out = tensor<T, 4>(part),
            in = bench::drawn<T, 4>({1, s.rows, heads, s.width / heads * 2}, 1)]() mutable {
      ops::copy_rows(ex, out.view(), in.view().slice(2, 0, heads / 2));
    };
  });
  // The sum is in fp32 whatever is added: with bf16 more bytes move than the share counts.
  bench::memory_bound("add_rows", []<class T>(exec::host& ex, shape s) {
    extents<4> const all{1, s.rows, heads, s.width / heads};
    return [&ex, sum = tensor<float, 4>(all), in = bench::drawn<T, 4>(all, 1)]() mutable {
      ops::add_rows(ex, sum.view(), in.view());
    };
  });
  benchmark::Initialize(&argc, argv);
  if (benchmark::ReportUnrecognizedArguments(argc, argv)) return 2;
  benchmark::RunSpecifiedBenchmarks();
}
