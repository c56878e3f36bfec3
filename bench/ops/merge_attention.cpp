#include <tessera/ops/merge_attention.hpp>

#include "support/operation.hpp"

using namespace tessera;
using catalog::shape;

int main(int argc, char** argv) {
  // The output is in fp32 whatever is merged: with bf16 more bytes move than the share counts.
  static constexpr index_t heads = 12;
  bench::memory_bound("merge_attention", []<class T>(exec::host& ex, shape s) {
    extents<4> const all{1, s.rows / heads, heads, s.width};
    extents<3> const rows{1, heads, s.rows / heads};
    return [&ex, out = tensor<float, 4>(all), sums = tensor<float, 3>(rows),
            part = bench::drawn<T, 4>(all, 1), part_sums = tensor<float, 3>(rows)]() mutable {
      ops::merge_attention(ex, out.view(), sums.view(), part.view(), part_sums);
    };
  });
  benchmark::Initialize(&argc, argv);
  if (benchmark::ReportUnrecognizedArguments(argc, argv)) return 2;
  benchmark::RunSpecifiedBenchmarks();
}
