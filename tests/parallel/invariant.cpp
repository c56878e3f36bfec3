/// Every configuration trains the same model: ranks, ZeRO stage, accumulation and micro-batch size change the
/// weights of a real transformer by rounding only, with padding in the batch and with dropout on.
#include <mutex>

#include "../nn/fixture.hpp"
#include "fixture.hpp"
#include <tessera/nn/model.hpp>
#include <tessera/parallel/data_parallel.hpp>

using namespace tessera;
using namespace fixture;
using host = exec::host;

namespace {

constexpr index_t length = 9, steps = 3;

struct way {
  int ranks; ///< 0: comm::self.
  int zero;
  index_t micro_batch;
};

struct run {
  std::vector<float> weights;
  std::vector<double> losses, norms;
};

/// Trains on `samples` samples a step, which the ranks share in stretches as even as they go.
template <class T, class G>
std::vector<run> train(nn::transformer_config const& config, index_t samples, way const& how) {
  std::vector<run> runs(static_cast<std::size_t>(how.ranks == 0 ? 1 : how.ranks));
  on_ranks(how.ranks, [&]<class Comm>(Comm& comm) {
    host ex({.threads = 1});
    nn::model<host, T, G> model(config, {.batch = how.micro_batch, .sequence_length = length});
    nn::initialise(ex, model.store(), 5);
    // A larger epsilon than in practice: the gradient of the keys' bias is zero but for rounding, and Adam
    // would blow that rounding up to whole steps.
    parallel::data_parallel<Comm, host, T, G> replicas(comm, ex, parallel::flat_model_of(model.store()),
                                                       {.epsilon = 1e-5},
                                                       {.zero = how.zero, .bucket_bytes = 3000});
    auto& mine = runs[static_cast<std::size_t>(comm.rank())];
    for (index_t step = 0; step < steps; ++step) {
      batch const all(samples, length, config.vocabulary_size, static_cast<std::uint64_t>(100 + step));
      auto const part = layout::shard_of(samples, comm.size(), comm.rank());
      nn::loss_sum loss;
      if (part.empty()) replicas.nothing_to_add(ex);
      for (auto first = part.begin; first < part.end; first += how.micro_batch) {
        auto const last = std::min(first + how.micro_batch, part.end);
        nn::pass const pass{.seed = 9,
                            .step = static_cast<std::uint64_t>(step),
                            .first_sample = first,
                            .accumulate = first > part.begin};
        loss += model.forward_backward(ex, all.token_view(first, last), all.target_view(first, last), pass,
                                       [&](std::size_t unit) {
                                         if (last == part.end) replicas.gradients_ready(unit);
                                       });
      }
      auto const done = replicas.update(
          ex, loss, {.step = step + 1, .learning_rate = 0.01, .clip_norm = step == 1 ? 0.5 : 0});
      mine.losses.push_back(parallel::mean_of(done.loss));
      mine.norms.push_back(done.gradient_norm);
    }
    for (auto w : model.store().weights()) mine.weights.push_back(static_cast<float>(w));
  });
  return runs;
}

std::vector<way> ways() {
  std::vector<way> all;
  for (int ranks : {1, 2, 3, 4})
    for (int zero : {0, 1})
      for (index_t micro_batch : {1, 2, 7}) all.push_back({ranks, zero, micro_batch});
  return all;
}

template <class T, class G>
void check_all_ways(nn::transformer_config const& config, index_t samples, double tolerance) {
  auto const alone = train<T, G>(config, samples, {0, 0, samples}).front();
  for (auto const& how : ways()) {
    CAPTURE(how.ranks);
    CAPTURE(how.zero);
    CAPTURE(how.micro_batch);
    auto const runs = train<T, G>(config, samples, how);
    CHECK(distance(runs.front().weights, alone.weights) < tolerance);
    CHECK(distance(runs.front().losses, alone.losses) < tolerance);
    CHECK(distance(runs.front().norms, alone.norms) < tolerance);
    for (auto const& each : runs) {
      CHECK(same_bits(each.weights, runs.front().weights));
      CHECK(each.losses == runs.front().losses);
      CHECK(each.norms == runs.front().norms);
    }
  }
}

} // namespace

TEST_CASE("GPT-2: any ranks, ZeRO stage and micro-batches train the same model") {
  check_all_ways<float, float>(odd_gpt2(), 7, 1e-5);
}

TEST_CASE("Llama: any ranks, ZeRO stage and micro-batches train the same model") {
  check_all_ways<float, float>(odd_llama(), 7, 1e-5);
}

TEST_CASE("With dropout on, whose masks follow the sample and not the rank") {
  auto gpt2 = odd_gpt2();
  gpt2.dropout = 0.25f;
  check_all_ways<float, float>(gpt2, 5, 1e-5);
  auto llama = odd_llama();
  llama.dropout = 0.25f;
  llama.tied_head = true;
  check_all_ways<float, float>(llama, 5, 1e-5);
}

TEST_CASE("With fewer samples than ranks, so that some ranks have none") {
  check_all_ways<float, float>(odd_gpt2(), 2, 1e-5);
}

TEST_CASE("With bf16 weights and fp32 gradients, within what bf16 activations round") {
  check_all_ways<bf16, float>(odd_llama(), 5, 1e-2);
}
