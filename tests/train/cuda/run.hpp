/// What the tests of training on CUDA share: one run, on any space and its ranks, of a small GPT-2 and a
/// small Llama.
#ifndef TESSERA_TESTS_TRAIN_CUDA_RUN_HPP
#define TESSERA_TESTS_TRAIN_CUDA_RUN_HPP

#include <doctest/doctest.h>

#include "../../nn/fixture.hpp"
#include <tessera/cuda.cuh>

#include <tessera/comm/self.hpp>
#include <tessera/comm/threads.hpp>
#include <tessera/exec/host.hpp>
#include <tessera/nn/model.hpp>
#include <tessera/parallel/data_parallel.hpp>

namespace training {

using namespace tessera;
using fixture::distance;

constexpr index_t samples = 2, length = 16, steps = 5;

/// Heads of 64 and of 16, tied and not, dropout on where the family has it.
inline nn::transformer_config gpt2() {
  return {.vocabulary_size = 101,
          .sequence_length = length,
          .width = 64,
          .layers = 2,
          .heads = 1,
          .dropout = 0.1f,
          .initial_deviation = 0.1f};
}
inline nn::transformer_config llama() {
  return {.family = nn::transformer_family::llama,
          .vocabulary_size = 101,
          .sequence_length = length,
          .width = 64,
          .layers = 2,
          .heads = 4,
          .key_value_heads = 2,
          .tied_head = false,
          .initial_deviation = 0.1f};
}

struct outcome {
  std::vector<float> weights;
  std::vector<double> losses, norms;
};

/// One rank of a run on any space.
template <class Comm, class Ex, storage_scalar T>
struct run {
  using memory = typename Ex::memory;

  Comm& comm;
  Ex& ex;
  nn::model<Ex, T, float> model;
  parallel::data_parallel<Comm, Ex, T, float> replicas;
  exec::staged<std::int32_t, 2, Ex> tokens, targets;
  index_t step = 0;
  outcome seen;

  // A larger epsilon than in practice: the gradient of GPT-2's key bias is zero but for rounding, and Adam
  // would blow that rounding up to whole steps.
  run(Comm& comm_, Ex& ex_, nn::transformer_config const& config)
      : comm(comm_), ex(ex_), model(config, {.batch = samples, .sequence_length = length}),
        replicas(comm, ex, parallel::flat_model_of(model.store()), {.epsilon = 1e-5},
                 {.zero = comm.size() > 1 ? 1 : 0, .bucket_bytes = 30000}),
        tokens(ex, {samples, length}), targets(ex, {samples, length}) {
    nn::initialise(ex, model.store(), 5);
    replicas.start_from(ex, [&](std::size_t unit, layout::range part, auto out) {
      nn::initialise(ex, model.store().parameters(unit), part, out, 5);
    });
  }

  /// This rank's samples of the step's batch, where the space reads them.
  auto batch() {
    fixture::batch const all(samples, length, model.config().vocabulary_size,
                             static_cast<std::uint64_t>(100 + step));
    auto const part = layout::shard_of(samples, comm.size(), comm.rank());
    auto const at = static_cast<std::ptrdiff_t>(part.begin * length);
    auto const count = part.size() * length;
    std::copy_n(all.tokens.begin() + at, count, tokens.host().data());
    std::copy_n(all.targets.begin() + at, count, targets.host().data());
    return std::pair(tokens.upload(ex).slice(0, 0, part.size()), targets.upload(ex).slice(0, 0, part.size()));
  }

  nn::pass pass() const {
    return {.seed = 9,
            .step = static_cast<std::uint64_t>(step),
            .first_sample = layout::shard_of(samples, comm.size(), comm.rank()).begin};
  }

  void train(index_t until) {
    for (; step < until; ++step) {
      auto const [in, out] = batch();
      auto const loss = model.forward_backward(ex, in, out, pass(),
                                               [&](std::size_t unit) { replicas.gradients_ready(unit); });
      auto const done =
          replicas.update(ex, loss, {.step = step + 1, .learning_rate = 0.003, .clip_norm = 0.5});
      seen.losses.push_back(parallel::mean_of(done.loss));
      seen.norms.push_back(done.gradient_norm);
    }
    seen.weights = weights();
  }

  std::vector<float> weights() {
    std::vector<T> stored(static_cast<std::size_t>(model.store().size()));
    copy(ex, std::span(stored), model.store().weights());
    return {stored.begin(), stored.end()};
  }
  std::vector<float> gradients() {
    std::vector<float> values(static_cast<std::size_t>(model.store().size()));
    copy(ex, std::span(values), model.store().gradients());
    return values;
  }
};

template <storage_scalar T>
using host_run = run<comm::self, exec::host, T>;
template <storage_scalar T>
using cuda_run = run<comm::nccl, exec::cuda, T>;

template <storage_scalar T>
outcome on_host(nn::transformer_config const& config) {
  comm::self alone;
  exec::host ex({.threads = 1});
  host_run<T> mine(alone, ex, config);
  mine.train(steps);
  return mine.seen;
}

/// `wanted` ranks, or as many as this machine has devices for.
inline int ranks_here(int wanted) {
  auto const devices = exec::cuda_devices();
  if (devices < wanted) MESSAGE("not run on " << wanted << " ranks: there are " << devices << " devices");
  return std::min(wanted, devices);
}

/// Calls f(communicator, space) on each of `ranks` ranks.
template <class F>
void on_cuda_ranks(int ranks, F f) {
  comm::run_threads(ranks, [&](comm::threads& all) {
    exec::cuda ex({.device = all.rank(), .workspace_bytes = 1 << 16});
    comm::nccl linked(all, ex);
    f(linked, ex);
  });
}

template <storage_scalar T>
std::vector<outcome> on_cuda(int ranks, nn::transformer_config const& config) {
  std::vector<outcome> seen(static_cast<std::size_t>(ranks));
  on_cuda_ranks(ranks, [&](comm::nccl& comm, exec::cuda& ex) {
    cuda_run<T> mine(comm, ex, config);
    mine.train(steps);
    seen[static_cast<std::size_t>(comm.rank())] = mine.seen;
  });
  return seen;
}

inline void check_close(outcome const& found, outcome const& expected, double tolerance) {
  REQUIRE(found.losses.size() == static_cast<std::size_t>(steps));
  CHECK(distance(found.losses, expected.losses) < tolerance);
  CHECK(distance(found.norms, expected.norms) < tolerance);
  CHECK(distance(found.weights, expected.weights) < tolerance);
  MESSAGE("losses differ by " << distance(found.losses, expected.losses) << ", norms by "
                              << distance(found.norms, expected.norms) << ", weights by "
                              << distance(found.weights, expected.weights));
}

template <storage_scalar T>
void check_steps(nn::transformer_config const& config, double tolerance) {
  auto const expected = on_host<T>(config);
  CHECK(expected.losses.back() != expected.losses.front());
  for (int ranks : {1, 2}) {
    if (ranks_here(ranks) < ranks) continue;
    CAPTURE(ranks);
    auto const found = on_cuda<T>(ranks, config);
    check_close(found.front(), expected, tolerance);
    CHECK(found.back().weights == found.front().weights);
    CHECK(found.back().losses == found.front().losses);
  }
}

} // namespace training

#endif
