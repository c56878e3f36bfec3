// requires: mpi
// smoke: zero.3|1f1b
// A training step under each layout of two ranks, beside the same step by one rank: each rank of ours has
// half of that work, so a ratio of 1 is a perfect split. A small GPT-2, the optimizer's update included. Run
// under mpiexec.
#include <memory>

#include <tessera/core/philox.hpp>
#include <tessera/parallel/distributed_model.hpp>
#include <tessera/parallel/layout_text.hpp>

#include "support/ranks.hpp"

namespace {

using namespace tessera;

constexpr index_t batch = 8, length = 64;

nn::transformer_config config() {
  return {.vocabulary_size = 2048, .sequence_length = length, .width = 128, .layers = 4, .heads = 4};
}

/// Steps over samples of random tokens.
struct run {
  exec::host ex{{.threads = 1}};
  parallel::distributed_model<comm::mpi, exec::host, float, float> model;
  tensor<std::int32_t, 2> tokens;
  index_t step = 0;

  run(comm::mpi& ranks, std::string const& layout)
      : model(ranks, ex, config(), parallel::parse_layout(layout), {.batch = batch}),
        tokens({batch, model.group().local_sequence(length)}) {
    model.initialise(ex, 1);
    philox const random(3);
    std::uint64_t i = 0;
    for (auto& t : tokens.span()) t = static_cast<std::int32_t>(random.bits(i++) % 2048);
  }
  void operator()() {
    ++step;
    (void)model.step(
        ex,
        [&](layout::range samples) {
          view<std::int32_t const, 2> const rows = tokens.view().slice(0, samples.begin, samples.end);
          return parallel::local_samples<exec::host>{rows, rows};
        },
        {.step = step, .learning_rate = 1e-4}, {.seed = 1, .step = static_cast<std::uint64_t>(step)});
  }
};

} // namespace

int main(int argc, char** argv) {
  bench::run_on_ranks(argc, argv, [](comm::mpi& ranks, double seconds) {
    auto alone = std::make_unique<comm::mpi>(ranks.split(ranks.rank(), 0));
    for (auto const* layout :
         {"data 2, zero 0, micro-batch 4", "data 2, zero 1, micro-batch 4", "data 2, zero 2, micro-batch 4",
          "data 2, zero 3, micro-batch 4", "data 1 x tensor 2, micro-batch 4",
          "data 1 x tensor 2, sequence parallel, micro-batch 4", "data 1 x context 2, micro-batch 4",
          "data 1 x context 2, exchange, micro-batch 4", "data 1 x pipeline 2, 1f1b, micro-batch 1",
          "data 1 x pipeline 2, interleaved 2, micro-batch 1",
          "data 1 x pipeline 2, zero bubble, micro-batch 1"})
      bench::register_on_ranks(
          "parallel/distributed_model/" + std::string(layout),
          [&ranks, seconds, layout, one = alone.get()](benchmark::State& state) {
            auto const parsed = parallel::parse_layout(layout);
            run shared(ranks, layout),
                whole(*one, tessera::text_of("data 1, micro-batch ", parsed.micro_batch));
            bench::by_turns_on_ranks(
                state, seconds, "one rank's step, halved", [&] { shared(); }, [&] { whole(); }, 0.5);
          });
    return alone;
  });
}
