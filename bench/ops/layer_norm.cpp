#include <tessera/ops/layer_norm.hpp>

#include "support/operation.hpp"

using namespace tessera;
using catalog::shape;

int main(int argc, char** argv) {
  bench::memory_bound("layer_norm", []<class T>(exec::host& ex, shape s) {
    return [&ex, out = tensor<T, 2>({s.rows, s.width}), in = bench::drawn<T, 2>({s.rows, s.width}, 1),
            gain = bench::drawn<T, 1>({s.width}, 2), bias = bench::drawn<T, 1>({s.width}, 3),
            mean = tensor<float, 1>({s.rows}), deviation = tensor<float, 1>({s.rows})]() mutable {
      ops::layer_norm(ex, out.view(), mean.view(), deviation.view(), in, gain, bias);
    };
  });
  bench::memory_bound("residual_layer_norm", []<class T>(exec::host& ex, shape s) {
    return [&ex, out = tensor<T, 2>({s.rows, s.width}), sum = tensor<T, 2>({s.rows, s.width}),
            a = bench::drawn<T, 2>({s.rows, s.width}, 1), b = bench::drawn<T, 2>({s.rows, s.width}, 2),
            gain = bench::drawn<T, 1>({s.width}, 3), bias = bench::drawn<T, 1>({s.width}, 4),
            mean = tensor<float, 1>({s.rows}), deviation = tensor<float, 1>({s.rows})]() mutable {
      ops::residual_layer_norm(ex, out.view(), sum.view(), mean.view(), deviation.view(), a, b, gain, bias);
    };
  });
  bench::memory_bound("layer_norm_backward", []<class T>(exec::host& ex, shape s) {
    return [&ex, d_in = tensor<T, 2>({s.rows, s.width}), d_out = bench::drawn<T, 2>({s.rows, s.width}, 1),
            in = bench::drawn<T, 2>({s.rows, s.width}, 2), gain = bench::drawn<T, 1>({s.width}, 3),
            d_gain = tensor<float, 1>({s.width}), d_bias = tensor<float, 1>({s.width}),
            mean = tensor<float, 1>({s.rows}), deviation = tensor<float, 1>({s.rows})]() mutable {
      ops::layer_norm_backward(ex, d_in.view(), d_gain.view(), d_bias.view(), d_out, in, mean, deviation,
                               gain);
    };
  });
  benchmark::Initialize(&argc, argv);
  if (benchmark::ReportUnrecognizedArguments(argc, argv)) return 2;
  benchmark::RunSpecifiedBenchmarks();
}
