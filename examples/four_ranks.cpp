// Four ranks learn four stretches of a sentence by heart, together: each computes the gradients of its own
// stretch, backward overlaps with their summation, and every rank keeps a quarter of the optimizer's state
// (ZeRO-1). Needs nothing but a C++20 compiler:  g++ -std=c++20 -O2 -pthread -Iinclude
// examples/four_ranks.cpp
#include <cstdio>

#include <tessera/comm/threads.hpp>
#include <tessera/data/bytes.hpp>
#include <tessera/exec/host.hpp>
#include <tessera/nn/model.hpp>
#include <tessera/parallel/data_parallel.hpp>

using namespace tessera;

int main() {
  auto const text =
      data::byte_tokenizer().encode("In the beginning God created the heaven and the earth. "
                                    "And the earth was without form, and void; and darkness was "
                                    "upon the face of the deep.");
  comm::run_threads(4, [&](comm::threads& ranks) { // with comm::mpi the same lines run on a cluster
    exec::host ex({.threads = 1});
    nn::model<exec::host, float, float> model(nn::tiny_gpt2(), {.batch = 1, .sequence_length = 32});
    nn::initialise(ex, model.store(), 42);
    parallel::data_parallel<comm::threads, exec::host, float, float> replicas(
        ranks, ex, parallel::flat_model_of(model.store()), {.weight_decay = 0});
    view<std::int32_t const, 2> tokens(text.data() + 32 * ranks.rank(), {1, 32}),
        targets(tokens.data() + 1, {1, 32});
    for (index_t step = 1; step <= 60; ++step) {
      auto loss =
          model.forward_backward(ex, tokens, targets, {}, [&](auto unit) { replicas.gradients_ready(unit); });
      auto done = replicas.update(ex, loss, {.step = step, .learning_rate = 3e-3});
      if (ranks.rank() == 0 && step % 20 == 0)
        std::printf("step %d: loss %.1f\n", int(step), parallel::mean_of(done.loss));
    }
  });
}
