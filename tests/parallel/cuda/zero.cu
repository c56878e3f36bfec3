// requires: nccl
#include <tessera/comm/cuda/nccl.cuh>
#include <tessera/comm/threads.hpp>
#include <tessera/exec/copy_cuda.hpp>
#include <tessera/parallel/zero.hpp>

#include <tessera/ops/cuda/add.cuh>
#include <tessera/ops/cuda/cast.cuh>
#include <tessera/ops/cuda/reduce.cuh>
#include <tessera/ops/cuda/scale.cuh>
#include <tessera/optim/cuda/flat_update.cuh>

#include <mutex>

#include "support/devices.hpp"
#include <doctest/doctest.h>
#include <tessera/exec/host.hpp>

using namespace tessera;

namespace {

struct outcome {
  std::vector<float> weights; ///< Of rank 0.
  std::vector<double> norms;
  friend bool operator==(outcome const&, outcome const&) = default;
};

std::vector<layout::parameter_map> units_of_test() {
  using enum layout::parameter_kind;
  std::vector<layout::parameter_map> maps(4);
  maps[0].add("table", {19, 5}, token_embedding, {});
  maps[1].add("a", {40, 3}, matrix, {});
  maps[1].add("a.bias", {3}, bias, {});
  maps[2].add("b", {120}, matrix, {});
  maps[2].add("b.bias", {3}, bias, {});
  maps[3].add("gain", {7}, norm_gain, {});
  return maps;
}

/// Small integers: sums in any order are exact.
float gradient_of(index_t step, index_t sample, std::size_t unit, index_t element) {
  return static_cast<float>((step * 5 + sample * 3 + static_cast<index_t>(unit) * 7 + element) % 9 - 4);
}

/// Two steps of two micro-batches a rank; the last unit is tied to the first.
template <class Comm, exec::space Ex>
void train(Comm& comm, Ex& ex, parallel::zero_options const& options, outcome& found) {
  using memory = typename Ex::memory;
  auto const maps = units_of_test();
  std::vector<parallel::zero_unit> units;
  for (auto const& map : maps) units.push_back({.map = &map});
  units.back().tied = 0;
  parallel::zero<Comm, Ex, bf16, float> state({.gradients = comm, .world = comm}, ex, units, {}, options);
  state.start_from(ex, [&](std::size_t u, layout::range part, memory_span<float, memory> out) {
    std::vector<float> values(out.size());
    for (auto const& s : layout::segments_of(maps[u], part))
      for (auto e = s.in_block.begin; e < s.in_block.end; ++e)
        values[static_cast<std::size_t>(e - part.begin)] = static_cast<float>(e % 13) / 8 - 0.7f;
    exec::copy(ex, out, std::span<float const>(values));
  });
  auto const write = [&](memory_span<float, memory> block, std::size_t u, index_t step, index_t sample,
                         bool adds) {
    std::vector<float> values(block.size());
    exec::copy(ex, std::span<float>(values), memory_span<float const, memory>(block));
    ex.synchronize();
    for (auto const& p : maps[u])
      for (auto e = p.where().begin; e < p.where().end; ++e) {
        auto& g = values[static_cast<std::size_t>(e)];
        g = (adds ? g : 0) + gradient_of(step, sample, u, e);
      }
    exec::copy(ex, block, std::span<float const>(values));
    ex.synchronize();
  };
  auto const end = units.size();
  for (index_t step = 0; step < 2; ++step) {
    for (index_t i = 0; i < 2; ++i) {
      auto const sample = 2 * comm.rank() + i;
      auto const adds = state.accumulates(i);
      for (std::size_t u = 0; u + 1 < end; ++u) {
        (void)state.lend(ex, u, {.next = u + 1, .gradients = false});
        state.done(u);
      }
      for (auto u = end; u-- > 0;) {
        auto const lent = state.lend(ex, u, {.next = u > 0 ? u - 1 : parallel::no_unit, .micro_batch = i});
        if (u + 1 == end) write(lent.tied_gradients, 0, step, sample + 10, adds);
        write(lent.gradients, u, step, sample, adds || u == 0);
        state.done(u);
        state.gradients_ready(ex, u, i == 1);
      }
    }
    std::vector<nn::loss_sum> const losses(2, {1, 1});
    auto const done = state.update(ex, losses, {.step = step + 1, .learning_rate = 0.01, .clip_norm = 1});
    if (comm.rank() == 0) found.norms.push_back(done.gradient_norm);
  }
  for (std::size_t u = 0; u < end; ++u) {
    auto const lent = state.lend(ex, u, {.gradients = false});
    std::vector<bf16> values(lent.weights.size());
    exec::copy(ex, std::span<bf16>(values), lent.weights);
    ex.synchronize();
    state.done(u);
    if (comm.rank() == 0)
      for (auto v : values) found.weights.push_back(static_cast<float>(v));
  }
}

} // namespace

TEST_CASE("Devices end with the bits of host ranks, under every stage") {
  for (int ranks : {1, 2}) {
    if (test::ranks_here(ranks) < ranks) continue;
    for (int stage : {0, 1, 2, 3})
      for (bool reproducible : {false, true}) {
        CAPTURE(ranks);
        CAPTURE(stage);
        CAPTURE(reproducible);
        parallel::zero_options const options{
            .stage = stage, .bucket_bytes = 500, .reproducible = reproducible, .micro_batches = 2};
        outcome expected, found;
        comm::run_threads(ranks, [&](comm::threads& hosts) {
          exec::host ex({.threads = 1});
          train(hosts, ex, options, expected);
        });
        comm::run_threads(ranks, [&](comm::threads& hosts) {
          exec::cuda ex({.device = hosts.rank()});
          comm::nccl devices_of(hosts, ex, {.stall_limit = 30});
          train(devices_of, ex, options, found);
        });
        CHECK(found == expected);
        CHECK(found.weights.size() > 100);
      }
  }
}
