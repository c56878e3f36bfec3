#include <tessera/ops/attention.hpp>

#include "support/operation.hpp"

using namespace tessera;
using catalog::shape;

int main(int argc, char** argv) {
  // Causal: half of the products that the catalog counts, in blocks small enough for the caches. The peer is
  // one product of a size that shows the peak.
  static constexpr index_t heads = 12;
  std::vector<bench::product_shape> const peak{{1024, 1024, 1024}};
  bench::product_bound("attention", peak, []<class T>(exec::host& ex, shape s) {
    extents<4> const all{1, s.rows / heads, heads, s.width};
    return
        [&ex, out = tensor<T, 4>(all), sums = tensor<float, 3>({1, heads, s.rows / heads}),
         q = bench::drawn<T, 4>(all, 1), k = bench::drawn<T, 4>(all, 2),
         v = bench::drawn<T, 4>(all, 3)]() mutable { ops::attention(ex, out.view(), sums.view(), q, k, v); };
  });
  bench::product_bound("attention_backward", peak, []<class T>(exec::host& ex, shape s) {
    extents<4> const all{1, s.rows / heads, heads, s.width};
    tensor<T, 4> out(all), q = bench::drawn<T, 4>(all, 1), k = bench::drawn<T, 4>(all, 2),
                           v = bench::drawn<T, 4>(all, 3);
    tensor<float, 3> sums({1, heads, s.rows / heads});
    ops::attention(ex, out.view(), sums.view(), q, k, v);
    return [&ex, dq = tensor<T, 4>(all), dk = tensor<T, 4>(all), dv = tensor<T, 4>(all),
            d_out = bench::drawn<T, 4>(all, 4), q = std::move(q), k = std::move(k), v = std::move(v),
            out = std::move(out), sums = std::move(sums)]() mutable {
      ops::attention_backward(ex, dq.view(), dk.view(), dv.view(), d_out, q, k, v, out, sums);
    };
  });
  benchmark::Initialize(&argc, argv);
  if (benchmark::ReportUnrecognizedArguments(argc, argv)) return 2;
  benchmark::RunSpecifiedBenchmarks();
}
