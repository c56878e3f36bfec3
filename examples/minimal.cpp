// The README's program. Needs nothing but a C++20 compiler:
//   g++ -std=c++20 -O2 -pthread -Iinclude examples/minimal.cpp && ./a.out
// [doc: minimal]
#include <cstdio>
#include <tessera/comm/threads.hpp>
#include <tessera/optim/adamw.hpp>

int main() {
  tessera::comm::run_threads(4, [](auto& ranks) { // four ranks; comm::mpi runs the same lines on a cluster
    tessera::exec::host ex({.threads = 1});
    std::vector<float> weights(3, 1.0f), gradients(3, 0.5f + static_cast<float>(ranks.rank()));
    tessera::optim::adamw<tessera::exec::host, float> optimizer(ex, 3, {.weight_decay = 0.1}, {{0, 3}});
    ranks.all_reduce(std::span(gradients)); // summed in rank order: the same bits on every rank, in every run
    optimizer.step(ex, std::span(weights), std::span<float const>(gradients), {.learning_rate = 0.1});
    std::printf("gradient %.1f, weight %.2f\n", gradients[0], weights[0]);
  });
}
// [/doc]
