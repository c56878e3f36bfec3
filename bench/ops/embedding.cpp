#include <tessera/ops/embedding.hpp>

#include "support/operation.hpp"

using namespace tessera;
using catalog::shape;

namespace {
constexpr index_t vocabulary = 50257;
}

int main(int argc, char** argv) {
  bench::memory_bound("embedding", []<class T>(exec::host& ex, shape s) {
    return
        [&ex, s, out = tensor<T, 2>({s.rows, s.width}), table = bench::drawn<T, 2>({vocabulary, s.width}, 1),
         positions = bench::drawn<T, 2>({s.rows, s.width}, 2),
         tokens = bench::drawn_tokens(s.rows, vocabulary)]() mutable {
          ops::embedding(ex, out.view(), tokens.view().reshape<2>({1, s.rows}), table, positions);
        };
  });
  // As after a tied head: the sums are added to a table that is already there.
  bench::memory_bound("embedding_backward", []<class T>(exec::host& ex, shape s) {
    return [&ex, s, d_out = bench::drawn<T, 2>({s.rows, s.width}, 3),
            table = tensor<float, 2>({vocabulary, s.width}), positions = tensor<float, 2>({s.rows, s.width}),
            tokens = bench::drawn_tokens(s.rows, vocabulary)]() mutable {
      ops::embedding_backward(ex, table.view(), positions.view(), d_out.view(),
                              tokens.view().reshape<2>({1, s.rows}), {.accumulate_table = true});
    };
  });
  benchmark::Initialize(&argc, argv);
  if (benchmark::ReportUnrecognizedArguments(argc, argv)) return 2;
  benchmark::RunSpecifiedBenchmarks();
}
