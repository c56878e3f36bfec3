// requires: mpi
// mpi_ranks: 4
// own_main
/// Layouts over MPI ranks train the model of one rank.
#define DOCTEST_CONFIG_IMPLEMENT
#include "layouts_fixture.hpp"

#include <tessera/comm/mpi.hpp>
#include <tessera/parallel/layout_text.hpp>

using namespace tessera;
using namespace fixture;

namespace {

comm::mpi* world = nullptr;

/// Every rank compares the whole model: what the others count is summed over them.
void check_over_mpi(comm::mpi& ranks, layout_case const& of, char const* text) {
  CAPTURE(std::string(text));
  layout_run<comm::mpi> run(ranks, of, parallel::parse_layout(text));
  run.train();
  auto const expected = train_alone(of);
  for (auto const& [name, values] : expected.weights) run.seen.weights[name].resize(values.size());
  run.add_weights(run.seen.weights);
  for (auto& [name, values] : run.seen.weights)
    ranks.all_reduce(std::span<float>(values), comm::reduce_options{});
  check_same(run.seen, expected);
}

} // namespace

TEST_CASE("four ranks in four ways") {
  for (auto const& of : {layout_gpt2(), layout_llama()})
    for (auto const* text : {"data 2 x tensor 2, zero 3, sequence parallel, micro-batch 2",
                             "data 2 x pipeline 2, zero 2, 1f1b, micro-batch 1",
                             "tensor 2 x pipeline 2, zero bubble, recompute unit, micro-batch 2",
                             "data 2 x context 2, zero 1, micro-batch 2"})
      check_over_mpi(*world, of, text);
}

TEST_CASE("two ranks, while the others do as much beside them") {
  auto half = world->split(world->rank() / 2, world->rank());
  for (auto const* text :
       {"pipeline 2, interleaved 2, micro-batch 2", "context 2, exchange", "data 2, zero 3"})
    check_over_mpi(half, layout_llama(), text);
}

int main(int argc, char** argv) {
  return comm::run_mpi(argc, argv,
                       [&](comm::mpi& all) {
                         world = &all;
                         doctest::Context context(argc, argv);
                         return all.all_reduce(context.run(), {.operation = comm::reduction::max});
                       },
                       {.stall_limit = 60});
}
