// smoke: fp32
#include <tessera/ops/linear_cross_entropy.hpp>

#include "support/operation.hpp"

using namespace tessera;
using catalog::shape;

int main(int argc, char** argv) {
  bench::product_bound(
      "linear_cross_entropy",
      {{256, 50257, 768, false, true}, {256, 768, 50257}, {50257, 768, 256, true, false}},
      []<class T>(exec::host& ex, shape s) {
        return [&ex, d_in = tensor<T, 2>({s.rows, s.depth}), d_weight = tensor<float, 2>({s.width, s.depth}),
                in = bench::drawn<T, 2>({s.rows, s.depth}, 1),
                weight = bench::drawn<T, 2>({s.width, s.depth}, 2),
                targets = bench::drawn_tokens(s.rows, s.width),
                memory = arena<>(ops::linear_cross_entropy_scratch_bytes<T>(s.rows, s.width))]() mutable {
          ops::linear_cross_entropy(
              ex, ops::linear_cross_entropy_gradients<T, float>{d_in.view(), d_weight.view()}, in, weight,
              targets, {}, memory);
        };
      });
  benchmark::Initialize(&argc, argv);
  if (benchmark::ReportUnrecognizedArguments(argc, argv)) return 2;
  benchmark::RunSpecifiedBenchmarks();
}
