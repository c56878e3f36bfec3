// Four ranks learn four stretches of a sentence by heart, together, laid out as one line of text says: two
// pairs of ranks take two samples each, the ranks of a pair share every matrix, and ZeRO-3 gives each rank
// its part of weights, gradients and optimizer state. Any other layout of four ranks trains the same model:
//   ./four_ranks "data 1 x tensor 1 x pipeline 2 x context 2, zero 1, zero bubble, micro-batch 1"
// Needs nothing but a C++20 compiler:
//   g++ -std=c++20 -O2 -pthread -Iinclude examples/four_ranks.cpp
#include <cstdio>

#include <tessera/comm/threads.hpp>
#include <tessera/data/bytes.hpp>
#include <tessera/exec/host.hpp>
#include <tessera/parallel/distributed_model.hpp>
#include <tessera/parallel/layout_text.hpp>

using namespace tessera;

namespace {

constexpr index_t length = 32;

void train(comm::threads& ranks, char const* text_of_layout, std::vector<std::int32_t> const& text) {
  exec::host ex({.threads = 1});
  parallel::distributed_model<comm::threads, exec::host, float, float> model(
      ranks, ex, nn::tiny_gpt2(), parallel::parse_layout(text_of_layout),
      {.batch = 4, .sequence_length = length, .optimizer = {.weight_decay = 0}});
  model.initialise(ex, 42);

  // Which tokens of its samples a rank works on, the layout knows too.
  auto const positions = model.group().positions(length);
  auto const here = model.group().local_sequence(length);
  tensor<std::int32_t, 2> tokens({4, here}), targets({4, here});
  for (index_t i = 0; i < 4; ++i)
    for (index_t t = 0; t < here; ++t) {
      auto const at = static_cast<std::size_t>(length * i + positions(t));
      tokens.view()(i, t) = text[at];
      targets.view()(i, t) = text[at + 1];
    }
  for (index_t step = 1; step <= 60; ++step) {
    auto const done = model.step(ex,
                                 [&](layout::range samples) {
                                   return parallel::local_samples<exec::host>{
                                       tokens.view().slice(0, samples.begin, samples.end),
                                       targets.view().slice(0, samples.begin, samples.end)};
                                 },
                                 {.step = step, .learning_rate = 3e-3});
    if (ranks.rank() == 0 && step % 20 == 0)
      std::printf("step %d: loss %.2f\n", int(step), parallel::mean_of(done.loss));
  }
}

} // namespace

int main(int argc, char** argv) {
  auto const text =
      data::byte_tokenizer().encode("In the beginning God created the heaven and the earth. "
                                    "And the earth was without form, and void; and darkness was "
                                    "upon the face of the deep.");
  try {
    comm::run_threads(4, [&](comm::threads& ranks) { // with comm::mpi the same lines run on a cluster
      train(ranks, argc > 1 ? argv[1] : "data 2 x tensor 2, zero 3", text);
    });
  } catch (std::exception const& fault) {
    std::fprintf(stderr, "four_ranks: %s\n", fault.what());
    return 1;
  }
}
