// requires: nccl
#include <doctest/doctest.h>

#include <tessera/cuda.cuh>
#include <tessera/ops/cuda/copy_rows.cuh>
#include <tessera/ops/cuda/merge_attention.cuh>

#include "../shared_model.hpp"
#include "support/devices.hpp"

using namespace tessera;

namespace {

bool has_devices(int wanted) {
  return test::ranks_here(wanted) == wanted;
}

/// Two ranks share one key and value head; parts of vocabulary and inner width are uneven.
nn::transformer_config llama() {
  return {.family = nn::transformer_family::llama,
          .vocabulary_size = 37,
          .sequence_length = 16,
          .width = 32,
          .layers = 1,
          .heads = 2,
          .key_value_heads = 1,
          .feed_forward = 29,
          .dropout = 0.2f,
          .tied_head = false};
}

struct llamas {
  using storage = float;

  template <class Ex, class Group>
  nn::unit_list<Ex, float, float> make(nn::transformer_config const& config, Group const& group) const {
    nn::unit_list<Ex, float, float> units;
    units.push_back(std::make_unique<nn::embedding<Ex, float, float, Group>>(config, group));
    units.push_back(std::make_unique<nn::llama_block<Ex, float, float, Group>>(config, 0, group));
    units.push_back(
        std::make_unique<nn::head<Ex, float, float, nn::rms_norm<Ex, float, float>, Group>>(config, group));
    return units;
  }
};

std::vector<shared::outcome> run_on_devices(int ranks, nn::transformer_config const& config,
                                            fixture::batch const& batch,
                                            parallel::model_group_options const& options,
                                            shared::manner const& how) {
  std::vector<shared::outcome> results(static_cast<std::size_t>(ranks));
  comm::run_threads(ranks, [&](comm::threads& threads) {
    exec::cuda ex({.device = threads.rank()});
    comm::nccl world(threads, ex);
    partition::mesh<comm::nccl> mesh(world, {.tensor = ranks});
    auto& mine = results[static_cast<std::size_t>(threads.rank())];
    mine =
        shared::run(ex, config, parallel::model_group<comm::nccl>(mesh, options), batch, how, {}, llamas());
    mine.tensor_rank = threads.rank();
  });
  return results;
}

} // namespace

TEST_CASE("a model shared by two devices has the loss and gradients of the host's, rows shared or not") {
  if (!has_devices(2)) return;
  auto const config = llama();
  fixture::batch const batch(3, 7, config.vocabulary_size);
  exec::host host({.threads = 1});
  auto const expected =
      shared::together({shared::run(host, config, nn::one_rank(), batch, {}, {}, llamas())});
  for (bool sequence : {false, true}) {
    CAPTURE(sequence);
    shared::manner const how{.recompute = sequence ? nn::recomputation::attention : nn::recomputation::none,
                             .split = sequence};
    auto const ranks = run_on_devices(2, config, batch, {.sequence_parallel = sequence}, how);
    auto const given = shared::together(ranks);
    CHECK(given.loss.count == expected.loss.count);
    CHECK(given.loss.sum == doctest::Approx(expected.loss.sum).epsilon(1e-5));
    for (auto const& parameter : expected.gradients) { // not bound by name: clang 14 captures no bindings
      auto const& name = parameter.first;
      auto const& whole = parameter.second;
      INFO(name);
      CHECK(fixture::distance(given.gradients.at(name), whole) < 1e-5);
    }
    for (auto const& r : ranks) CHECK(r.peak <= r.planned);
  }
}
