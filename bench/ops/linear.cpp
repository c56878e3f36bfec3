#include <tessera/ops/linear.hpp>

#include "support/operation.hpp"

using namespace tessera;
using catalog::shape;

int main(int argc, char** argv) {
  bench::product_bound("linear", {{1024, 768, 768, false, true}}, []<class T>(exec::host& ex, shape s) {
    return [&ex, out = tensor<T, 2>({s.rows, s.width}), in = bench::drawn<T, 2>({s.rows, s.depth}, 1),
            weight = bench::drawn<T, 2>({s.width, s.depth}, 2),
            bias = bench::drawn<T, 1>({s.width}, 3)]() mutable {
      ops::linear(ex, out.view(), in, weight, bias);
    };
  });
  bench::product_bound(
      "linear_backward", {{1024, 768, 768}, {768, 768, 1024, true, false}},
      []<class T>(exec::host& ex, shape s) {
        return [&ex, d_in = tensor<T, 2>({s.rows, s.depth}), d_weight = tensor<float, 2>({s.width, s.depth}),
                d_bias = tensor<float, 1>({s.width}), d_out = bench::drawn<T, 2>({s.rows, s.width}, 1),
                in = bench::drawn<T, 2>({s.rows, s.depth}, 2),
                weight = bench::drawn<T, 2>({s.width, s.depth}, 3)]() mutable {
          ops::linear_backward(ex,
                               ops::linear_gradients<T, float>{d_in.view(), d_weight.view(), d_bias.view()},
                               d_out, in, weight);
        };
      });
  benchmark::Initialize(&argc, argv);
  if (benchmark::ReportUnrecognizedArguments(argc, argv)) return 2;
  benchmark::RunSpecifiedBenchmarks();
}
