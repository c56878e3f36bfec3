// AdamW's one pass beside the triad over as many bytes.
#include <tessera/optim/adamw.hpp>

#include "support/measure.hpp"

namespace {

using namespace tessera;

template <class T, class G>
void adamw(benchmark::State& state) {
  exec::host ex;
  auto const n = index_t{state.range(0)};
  tensor<T, 1> weights({n});
  tensor<G, 1> gradients({n});
  optim::adamw<exec::host, T> optimizer(ex, n, {}, {{0, n}});
  index_t step = 0;
  double const read_and_written = (optimizer.has_master ? 3 : 2) * 8.0;
  double const weight = optimizer.has_master ? sizeof(T) : 2.0 * sizeof(T);
  auto const bytes = static_cast<double>(n) * (read_and_written + weight + sizeof(G));
  bench::against_triad(state, ex, bytes, [&] {
    optimizer.step(ex, weights.span(), std::span<G const>(gradients.span()),
                   {.step = ++step, .learning_rate = 1e-4, .gradient_scale = 1.0});
    benchmark::ClobberMemory();
  });
}

BENCHMARK(adamw<float, float>)->Name("optim/adamw/fp32")->Arg(1 << 25)->UseManualTime();
BENCHMARK(adamw<bf16, float>)->Name("optim/adamw/bf16")->Arg(1 << 25)->UseManualTime();
BENCHMARK(adamw<bf16, bf16>)->Name("optim/adamw/bf16_gradients_bf16")->Arg(1 << 25)->UseManualTime();

} // namespace

BENCHMARK_MAIN();
