// requires: mpi
// mpi_ranks: 4
// own_main
/// Layouts over MPI ranks train the model of one rank: that of nn::model and data_parallel, which know no
/// layout.
#define DOCTEST_CONFIG_IMPLEMENT
#include "layouts_fixture.hpp"

#include <tessera/comm/mpi.hpp>
#include <tessera/comm/self.hpp>
#include <tessera/nn/model.hpp>
#include <tessera/parallel/data_parallel.hpp>
#include <tessera/parallel/layout_text.hpp>

using namespace tessera;
using namespace fixture;

namespace {

comm::mpi* world = nullptr;

/// The plainest way: all samples at once, on one rank, through nn::model.
layout_outcome train_alone(layout_case const& of) {
  layout_outcome seen;
  comm::self alone;
  host ex({.threads = 1});
  nn::model<host, float, float> model(of.config, {.batch = of.samples, .sequence_length = of.length()});
  nn::initialise(ex, model.store(), 5);
  parallel::data_parallel<comm::self, host, float, float> replicas(
      alone, ex, parallel::flat_model_of(model.store()), layout_optimizer, {.zero = 0});
  for (index_t step = 0; step < of.steps; ++step) {
    auto const all = of.batch_of(step);
    auto const loss = model.forward_backward(ex, all.token_view(), all.target_view(), layout_pass(step),
                                             [&](std::size_t u) { replicas.gradients_ready(u); });
    auto const done = replicas.update(ex, loss, layout_update(step));
    seen.losses.push_back(parallel::mean_of(done.loss));
    seen.norms.push_back(done.gradient_norm);
  }
  auto const all = of.unseen();
  seen.evaluated = parallel::mean_of(model.evaluate(ex, all.token_view(), all.target_view()));
  model.store().for_each([&](layout::parameter const& p, layout::range r) {
    auto const w = model.store().weights();
    seen.weights[p.name] = {w.begin() + r.begin, w.begin() + r.end};
  });
  return seen;
}

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
  for (auto const* text : {"data 2, zero 1, micro-batch 1", "pipeline 2, interleaved 2, micro-batch 2",
                           "context 2, exchange", "data 2, zero 3"})
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
