#include <tessera/ops/cross_entropy.hpp>

#include "support/operation.hpp"

using namespace tessera;
using catalog::shape;

int main(int argc, char** argv) {
  auto const add = [](char const* name, bool gradient) {
    bench::memory_bound(name, [gradient]<class T>(exec::host& ex, shape s) {
      return [&ex, gradient, logits = bench::drawn<T, 2>({s.rows, s.width}, 1),
              losses = tensor<float, 1>({s.rows}), targets = bench::drawn_tokens(s.rows, s.width)]() mutable {
        ops::cross_entropy(ex, logits.view(), losses.view(), targets, {.write_gradient = gradient});
      };
    });
  };
  add("cross_entropy", false);
  add("cross_entropy with gradient", true);
  benchmark::Initialize(&argc, argv);
  if (benchmark::ReportUnrecognizedArguments(argc, argv)) return 2;
  benchmark::RunSpecifiedBenchmarks();
}
