/// A model without layers for the tests of parallel/zero.hpp: blocks of parameters, gaps between them, and
/// gradients that are small integers, so that every way of sharing the work must give the same bits. The last
/// unit is tied to the first, as a head is to the embedding.
#ifndef TESSERA_TESTS_PARALLEL_ZERO_FIXTURE_HPP
#define TESSERA_TESTS_PARALLEL_ZERO_FIXTURE_HPP

#include <functional>
#include <numeric>

#include "fixture.hpp"
#include <tessera/parallel/zero.hpp>

namespace fixture {

using parallel::zero;
using parallel::zero_options;
using parallel::zero_ranks;
using parallel::zero_unit;
using host = exec::host;

/// Units smaller than a granule of ownership, an empty one, an empty parameter, gaps of all lengths.
inline std::vector<layout::parameter_map> toy_maps() {
  using enum layout::parameter_kind;
  std::vector<layout::parameter_map> maps(6);
  maps[0].add("table", {37, 9}, token_embedding, {});
  maps[0].add("positions", {11, 9}, position_embedding, {});
  maps[1].add("a.matrix", {33, 31}, matrix, {});
  maps[1].add("a.bias", {1}, bias, {});
  maps[1].add("a.empty", {0, 5}, matrix, {});
  maps[1].add("a.gain", {7}, norm_gain, {});
  maps[3].add("b.gain", {1}, norm_gain, {});
  maps[4].add("c.matrix", {64, 65}, matrix, {});
  maps[4].add_joined("c.more", {3}, matrix, {});
  maps[5].add("head.gain", {31}, norm_gain, {});
  return maps;
}
inline std::vector<zero_unit> toy_units(std::vector<layout::parameter_map> const& maps) {
  std::vector<zero_unit> units;
  for (auto const& map : maps) units.push_back({.map = &map});
  units.back().tied = 0;
  return units;
}
inline std::vector<std::size_t> toy_starts(std::vector<layout::parameter_map> const& maps) {
  std::vector<std::size_t> starts{0};
  for (auto const& map : maps) starts.push_back(starts.back() + static_cast<std::size_t>(map.block_size()));
  return starts;
}

/// The first value of an element, by its number in the model.
inline float first_value(std::size_t element) {
  return philox(3, 5).normal(element) * 0.5f;
}

/// Integers, or numbers whose sums depend on the order.
enum class toy_gradients { integer, real };

/// Runs micro-batches on a rank's state as a runner of units would.
template <class State>
class toy_rank {
public:
  using G =
      typename std::remove_cvref_t<decltype(std::declval<typename State::blocks>().gradients)>::value_type;

  toy_rank(State& state, host& ex, std::vector<layout::parameter_map> const& maps,
           toy_gradients kind = toy_gradients::integer)
      : state_(state), ex_(ex), maps_(maps), kind_(kind), starts_(toy_starts(maps)) {}

  void start() {
    state_.start_from(ex_, [&](std::size_t u, layout::range part, std::span<float> out) {
      std::fill(out.begin(), out.end(), 0.0f);
      for (auto const& s : layout::segments_of(maps_[u], part))
        for (auto e = s.in_block.begin; e < s.in_block.end; ++e)
          out[static_cast<std::size_t>(e - part.begin)] =
              first_value(starts_[u] + static_cast<std::size_t>(e));
    });
  }

  /// Where it says so, a sample gives a unit no gradient: its backward does not run.
  std::function<bool(index_t sample, std::size_t u)> skips = [](index_t, std::size_t) { return false; };

  void forward(index_t step, index_t sample, index_t micro_batch) {
    auto const end = maps_.size();
    for (std::size_t u = 0; u + 1 < end; ++u) {
      (void)state_.lend(ex_, u, {.next = u + 1, .gradients = false});
      state_.done(u);
    }
    auto const lent = state_.lend(ex_, end - 1, {.next = end - 2, .micro_batch = micro_batch});
    // As the head does: the table's gradient first, and its own.
    write(0, lent.tied_gradients, 0, step, sample + 1000, state_.accumulates(micro_batch));
    for (std::size_t p = 0; p < maps_.back().size(); ++p)
      write(end - 1, lent.gradients, p, step, sample, state_.accumulates(micro_batch));
  }
  template <class After>
  void backward(index_t step, index_t sample, index_t micro_batch, bool last, After&& after) {
    auto const end = maps_.size();
    for (auto u = end; u-- > 0;) {
      if (u + 1 < end) {
        auto const skipped = skips(sample, u);
        auto const lent = state_.lend(
            ex_, u,
            {.next = u > 0 ? u - 1 : parallel::no_unit, .gradients = !skipped, .micro_batch = micro_batch});
        for (std::size_t p = 0; !skipped && p < maps_[u].size(); ++p)
          write(u, lent.gradients, p, step, sample, state_.accumulates(micro_batch) || (u == 0 && p == 0));
      }
      state_.done(u);
      state_.gradients_ready(ex_, u, last);
      after(u);
    }
  }
  void micro_batch(index_t step, index_t sample, index_t number, bool last) {
    forward(step, sample, number);
    backward(step, sample, number, last, [](std::size_t) {});
  }

  /// All weights as they are lent.
  std::vector<float> weights() {
    std::vector<float> all;
    for (std::size_t u = 0; u < maps_.size(); ++u) {
      auto const lent = state_.lend(ex_, u, {.gradients = false});
      for (auto w : lent.weights) all.push_back(static_cast<float>(w));
      state_.done(u);
    }
    return all;
  }

private:
  void write(std::size_t u, std::span<G> block, std::size_t p, index_t step, index_t sample,
             bool accumulate) {
    auto const where = maps_[u][p].where();
    for (auto e = where.begin; e < where.end; ++e) {
      auto& g = block[static_cast<std::size_t>(e)];
      auto const number = static_cast<index_t>(starts_[u]) + e;
      auto const one = kind_ == toy_gradients::integer
                           ? gradient_of(step, sample, number)
                           : philox(static_cast<std::uint64_t>(step), static_cast<std::uint64_t>(sample))
                                 .normal(static_cast<std::uint64_t>(number));
      g = G((accumulate ? static_cast<float>(g) : 0.0f) + one);
    }
  }

  State& state_;
  host& ex_;
  std::vector<layout::parameter_map> const& maps_;
  toy_gradients kind_;
  std::vector<std::size_t> starts_;
};

/// The gradient of a step: samples [0, samples), in fp64, gaps zero.
inline std::vector<double> toy_gradient(std::vector<layout::parameter_map> const& maps, index_t step,
                                        index_t samples) {
  auto const starts = toy_starts(maps);
  std::vector<double> sum(starts.back());
  for (std::size_t u = 0; u < maps.size(); ++u)
    for (auto const& p : maps[u])
      for (auto e = p.where().begin; e < p.where().end; ++e) {
        auto const at = starts[u] + static_cast<std::size_t>(e);
        for (index_t s = 0; s < samples; ++s) {
          sum[at] += gradient_of(step, s, static_cast<index_t>(at));
          if (u == 0 && &p == &maps[0][0]) sum[at] += gradient_of(step, s + 1000, static_cast<index_t>(at));
        }
      }
  return sum;
}

struct zero_way {
  int ranks;
  zero_options options;
  int groups = 1; ///< Of hybrid sharding.
};

inline std::vector<zero_way> const zero_ways = {
    {1, {.stage = 0}},
    {1, {.stage = 1}},
    {1, {.stage = 2}},
    {1, {.stage = 3}},
    {2, {.stage = 0, .bucket_bytes = 1}},
    {2, {.stage = 1, .in_flight = 1}},
    {2, {.stage = 2, .in_flight = 1}},
    {2, {.stage = 3, .in_flight = 1, .prefetch = 0}},
    {3, {.stage = 0, .bucket_bytes = 300, .in_flight = 1}},
    {3, {.stage = 1}},
    {3, {.stage = 2, .order = comm::summation::native}},
    {3, {.stage = 3}},
    {4, {.stage = 0}},
    {4, {.stage = 1, .in_flight = 100}},
    {4, {.stage = 2, .in_flight = 100}},
    {4, {.stage = 3, .in_flight = 3}},
    {4, {.stage = 1}, 2},
    {4, {.stage = 2}, 2},
    {4, {.stage = 3}, 2},
    {4, {.stage = 3}, 4},
    {8, {.stage = 3}},
    {2, {.stage = 0, .reproducible = true, .micro_batches = 4}},
    {4, {.stage = 1, .reproducible = true, .micro_batches = 2}},
    {2, {.stage = 2, .reproducible = true, .micro_batches = 4}},
    {4, {.stage = 3, .reproducible = true, .micro_batches = 2}},
    {4, {.stage = 3, .reproducible = true, .micro_batches = 2}, 2},
};

inline constexpr index_t zero_samples = 7, zero_steps = 3;

struct zero_outcome {
  std::vector<float> weights;
  std::vector<double> norms, losses;
  std::vector<double> sums; ///< Of the weights after each step.
};

/// Calls f(state, toy, ex, comm) on each rank.
template <class T, class G, class Optimizer, class F>
void on_zero_states(zero_way const& how, typename Optimizer::options_type const& settings, F f) {
  auto const maps = toy_maps();
  comm::run_threads(how.ranks, [&](comm::threads& comm) {
    host ex({.threads = 1});
    auto const inner = comm.size() / how.groups;
    auto shards = comm.split(comm.rank() / inner, comm.rank());
    auto replicas = comm.split(comm.rank() % inner, comm.rank());
    zero_ranks<comm::threads> const groups{
        .gradients = shards, .world = comm, .replicas = how.groups > 1 ? &replicas : nullptr};
    using state_type = zero<comm::threads, host, T, G, Optimizer>;
    state_type state(groups, ex, toy_units(maps), settings, how.options);
    toy_rank<state_type> toy(state, ex, maps);
    toy.start();
    f(state, toy, ex, comm);
  });
}

/// Trains on seven samples a step, dealt to the ranks in turn; a rank that has fewer than others, or none,
/// takes part all the same. Returns what each rank ends with.
template <class T, class G, class Optimizer>
std::vector<zero_outcome> train_zero(zero_way const& how,
                                     typename Optimizer::options_type const& settings = {}) {
  std::vector<zero_outcome> outcomes(static_cast<std::size_t>(how.ranks));
  on_zero_states<T, G, Optimizer>(how, settings, [&](auto& state, auto& toy, host& ex, auto& comm) {
    auto& mine = outcomes[static_cast<std::size_t>(comm.rank())];
    for (index_t step = 0; step < zero_steps; ++step) {
      // In step 1 the last rank has no sample at all.
      auto const idle = step == 1 && comm.size() > 1 && !how.options.reproducible;
      auto const active = comm.size() - (idle ? 1 : 0);
      auto const most =
          how.options.reproducible ? how.options.micro_batches : (zero_samples + active - 1) / active;
      std::vector<nn::loss_sum> losses;
      for (index_t i = 0; i < most; ++i) {
        auto const sample = comm.rank() + i * active;
        losses.push_back({});
        if (comm.rank() < active && sample < zero_samples) {
          losses.back() = {static_cast<double>(sample), 3};
          toy.micro_batch(step, sample, i, i + 1 == most);
        } else {
          state.nothing_to_add(ex, i + 1 == most);
        }
      }
      auto const done = state.update(
          ex, losses, {.step = step + 1, .learning_rate = 0.01, .clip_norm = step == 2 ? 1.0 : 0});
      mine.weights = toy.weights();
      mine.sums.push_back(std::accumulate(mine.weights.begin(), mine.weights.end(), 0.0));
      mine.norms.push_back(done.gradient_norm);
      mine.losses.push_back(done.loss.sum);
    }
  });
  return outcomes;
}

/// All ways, each rank of them, against one rank.
template <class T, class G, class Optimizer>
void check_zero_ways() {
  auto const expected = train_zero<T, G, Optimizer>({1, {.stage = 0}}).front();
  for (auto const& how : zero_ways) {
    if (how.options.reproducible && !std::same_as<G, float>) continue;
    CAPTURE(how.ranks);
    CAPTURE(how.groups);
    CAPTURE(how.options.stage);
    CAPTURE(how.options.reproducible);
    for (auto const& found : train_zero<T, G, Optimizer>(how)) {
      CHECK(same_bits(found.weights, expected.weights));
      CHECK(found.sums == expected.sums);
      CHECK(found.losses == expected.losses);
      CHECK(found.norms == expected.norms);
    }
  }
}

} // namespace fixture

#endif
