#include <tessera/ops/sliced_cross_entropy.hpp>

#include "support/operation.hpp"

using namespace tessera;
using catalog::shape;

int main(int argc, char** argv) {
  // One slice that is the whole vocabulary: what stands between it and cross_entropy is the second reading.
  bench::memory_bound("softmax_statistics", []<class T>(exec::host& ex, shape s) {
    return
        [&ex, statistics = tensor<float, 2>({s.rows, 4}), logits = bench::drawn<T, 2>({s.rows, s.width}, 1),
         targets = bench::drawn_tokens(s.rows, s.width)]() mutable {
          ops::softmax_statistics(ex, statistics.view(), logits.view(), targets);
        };
  });
  bench::memory_bound("cross_entropy_of", []<class T>(exec::host& ex, shape s) {
    auto logits = bench::drawn<T, 2>({s.rows, s.width}, 1);
    auto targets = bench::drawn_tokens(s.rows, s.width);
    tensor<float, 2> statistics({s.rows, 4});
    ops::softmax_statistics(ex, statistics.view(), logits.view(), targets);
    return [&ex, statistics = std::move(statistics), logits = std::move(logits), targets = std::move(targets),
            losses = tensor<float, 1>({s.rows})]() mutable {
      ops::cross_entropy_of(ex, logits.view(), losses.view(), targets, statistics, {.write_gradient = true});
    };
  });
  benchmark::Initialize(&argc, argv);
  if (benchmark::ReportUnrecognizedArguments(argc, argv)) return 2;
  benchmark::RunSpecifiedBenchmarks();
}
