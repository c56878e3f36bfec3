#include <tessera/parallel/zero.hpp>

#include <mutex>
#include <numeric>

#include "zero_fixture.hpp"
#include <tessera/optim/sgd.hpp>

using namespace tessera;
using namespace fixture;

namespace {

struct way {
  int ranks;
  zero_options options;
  int groups = 1; ///< Of hybrid sharding.
};

std::vector<way> const ways = {
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

constexpr index_t samples = 7, steps = 3;

struct outcome {
  std::vector<float> weights;
  std::vector<double> norms, losses;
  std::vector<double> sums; ///< Of the weights after each step.
};

/// Calls f(state, toy, ex, comm) on each rank.
template <class T, class G, class Optimizer, class F>
void on_states(way const& how, typename Optimizer::options_type const& settings, F f) {
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
std::vector<outcome> train(way const& how, typename Optimizer::options_type const& settings = {}) {
  std::vector<outcome> outcomes(static_cast<std::size_t>(how.ranks));
  on_states<T, G, Optimizer>(how, settings, [&](auto& state, auto& toy, host& ex, auto& comm) {
    auto& mine = outcomes[static_cast<std::size_t>(comm.rank())];
    for (index_t step = 0; step < steps; ++step) {
      // In step 1 the last rank has no sample at all.
      auto const idle = step == 1 && comm.size() > 1 && !how.options.reproducible;
      auto const active = comm.size() - (idle ? 1 : 0);
      auto const most =
          how.options.reproducible ? how.options.micro_batches : (samples + active - 1) / active;
      std::vector<nn::loss_sum> losses;
      for (index_t i = 0; i < most; ++i) {
        auto const sample = comm.rank() + i * active;
        losses.push_back({});
        if (comm.rank() < active && sample < samples) {
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

template <class T_, class G_, class Optimizer_>
struct kit {
  using T = T_;
  using G = G_;
  using Optimizer = Optimizer_;
};

} // namespace

TEST_CASE_TEMPLATE("Ranks, stages, groups, buckets and accumulation do not change a bit of the weights", K,
                   kit<float, float, optim::adamw<host, float>>, kit<bf16, float, optim::adamw<host, bf16>>,
                   kit<bf16, bf16, optim::sgd<host, bf16>>) {
  using T = typename K::T;
  using G = typename K::G;
  auto const expected = train<T, G, typename K::Optimizer>({1, {.stage = 0}}).front();
  for (auto const& how : ways) {
    if (how.options.reproducible && !std::same_as<G, float>) continue;
    CAPTURE(how.ranks);
    CAPTURE(how.groups);
    CAPTURE(how.options.stage);
    CAPTURE(how.options.reproducible);
    for (auto const& found : train<T, G, typename K::Optimizer>(how)) {
      CHECK(same_bits(found.weights, expected.weights));
      CHECK(found.sums == expected.sums);
      CHECK(found.losses == expected.losses);
      CHECK(found.norms == expected.norms);
    }
  }
}

TEST_CASE("The steps are those of AdamW in fp64 on the gradient of the mean loss") {
  optim::adamw_options const settings{.beta1 = 0.9, .beta2 = 0.95, .epsilon = 1e-8, .weight_decay = 0.1};
  auto const maps = toy_maps();
  auto const starts = toy_starts(maps);
  std::vector<double> weights(starts.back()), first(weights.size()), second(weights.size()),
      decays(weights.size());
  for (std::size_t u = 0; u < maps.size(); ++u)
    for (auto const& p : maps[u])
      for (auto e = p.where().begin; e < p.where().end; ++e) {
        auto const at = starts[u] + static_cast<std::size_t>(e);
        weights[at] = first_value(at);
        using kind = layout::parameter_kind;
        decays[at] =
            p.kind == kind::matrix || p.kind == kind::token_embedding || p.kind == kind::position_embedding
                ? settings.weight_decay
                : 0;
      }
  std::vector<double> norms;
  for (index_t step = 0; step < steps; ++step) {
    auto gradient = toy_gradient(maps, step, samples);
    double squares = 0;
    for (auto& g : gradient) {
      g /= 3 * samples;
      squares += g * g;
    }
    norms.push_back(std::sqrt(squares));
    auto const factor = step == 2 ? 1 / norms.back() : 1;
    for (std::size_t i = 0; i < weights.size(); ++i) {
      auto const g = gradient[i] * factor;
      first[i] = settings.beta1 * first[i] + (1 - settings.beta1) * g;
      second[i] = settings.beta2 * second[i] + (1 - settings.beta2) * g * g;
      auto const n = static_cast<double>(step + 1);
      auto const m = first[i] / (1 - std::pow(settings.beta1, n)),
                 v = second[i] / (1 - std::pow(settings.beta2, n));
      weights[i] -= 0.01 * (m / (std::sqrt(v) + settings.epsilon) + decays[i] * weights[i]);
    }
  }
  for (auto const& how : {way{2, {.stage = 2}}, way{3, {.stage = 3}}})
    for (auto const& found : train<float, float, optim::adamw<host, float>>(how, settings)) {
      CHECK(reference::max_relative_error(std::span<float const>(found.weights), weights) < 1e-5);
      for (std::size_t s = 0; s < norms.size(); ++s)
        CHECK(found.norms[s] == doctest::Approx(norms[s]).epsilon(1e-12));
    }
}

TEST_CASE("Frozen parameters keep their bits, have no state and count in no norm, under every stage") {
  auto const maps = toy_maps();
  auto const starts = toy_starts(maps);
  // Of unit 1 all but the bias between two others; unit 4 whole.
  auto const frozen = [](layout::parameter const& p) {
    return p.name == "a.bias" || p.name.starts_with("c.");
  };
  auto const train_frozen = [&](way how) {
    how.options.frozen = frozen;
    return train<bf16, float, optim::adamw<host, bf16>>(how);
  };
  auto const expected = train_frozen({1, {.stage = 0}}).front();
  auto gradient = toy_gradient(maps, 0, samples);
  double squares = 0;
  for (std::size_t u = 0; u < maps.size(); ++u)
    for (auto const& p : maps[u])
      for (auto e = p.where().begin; e < p.where().end; ++e) {
        auto const at = starts[u] + static_cast<std::size_t>(e);
        if (frozen(p))
          CHECK(expected.weights[at] == static_cast<float>(bf16(first_value(at))));
        else
          squares += gradient[at] * gradient[at];
      }
  CHECK(expected.norms[0] == doctest::Approx(std::sqrt(squares) / (3 * samples)).epsilon(1e-12));
  for (auto const& how :
       {way{2, {.stage = 0}}, way{2, {.stage = 1}}, way{3, {.stage = 2}}, way{3, {.stage = 3}},
        way{4, {.stage = 3}, 2}, way{2, {.stage = 1, .reproducible = true, .micro_batches = 4}}})
    for (auto const& found : train_frozen(how)) {
      CAPTURE(how.options.stage);
      CHECK(same_bits(found.weights, expected.weights));
      CHECK(found.norms == expected.norms);
    }
  way how{2, {.stage = 1, .frozen = frozen}};
  on_states<bf16, float, optim::adamw<host, bf16>>(how, {}, [&](auto& state, auto&, host&, auto&) {
    index_t kept = 0;
    for (auto const& each : state.stretches(1)) kept += each.where.size();
    if (!state.stretches(4).empty() || kept > state.counted(1).size())
      throw numeric_error("T", site::here(), "state of what is frozen");
  });
}

TEST_CASE(
    "A gradient or loss that is not finite on one rank stops the update on all, and leaves all as it was") {
  for (int stage : {0, 1, 2, 3})
    for (int what : {0, 1, 2}) {
      int wrong = 0;
      std::mutex guard;
      on_states<bf16, float, optim::adamw<host, bf16>>(
          {3, {.stage = stage}}, {}, [&](auto& state, auto& toy, host& ex, auto& comm) {
            auto const step = [&](bool spoil) {
              auto const here = spoil && comm.rank() == 2;
              toy.forward(0, comm.rank(), 0);
              if (here && what < 2) { // rank 2 spoils what rank 0 owns
                auto const lent = state.lend(ex, 5, {.next = 4});
                lent.gradients[0] = what == 0 ? NAN : INFINITY;
                state.done(5);
              }
              toy.backward(0, comm.rank(), 0, true, [](std::size_t) {});
              return state
                  .update(ex, nn::loss_sum{here && what == 2 ? NAN : 1.0, 1},
                          {.step = 1, .learning_rate = 0.1})
                  .applied;
            };
            auto const before = toy.weights();
            auto const spoilt = step(true);
            auto const same = same_bits(before, toy.weights());
            float moments = 0;
            for (std::size_t u = 0; u < state.units(); ++u)
              for (auto& each : state.stretches(u))
                for (auto const& array : each.optimizer.state())
                  if (array.name == "exp_avg")
                    for (auto v : array.values) moments += std::fabs(v);
            auto const good = step(false) && !same_bits(before, toy.weights()); // and training goes on
            std::scoped_lock lock(guard);
            wrong += spoilt || !same || moments != 0 || !good;
          });
      CAPTURE(stage);
      CAPTURE(what);
      CHECK(wrong == 0);
    }
}

TEST_CASE("A step in which no rank predicted anything changes nothing") {
  for (int stage : {0, 1, 2, 3}) {
    std::vector<int> wrong(2, -1);
    on_states<float, float, optim::adamw<host, float>>(
        {2, {.stage = stage}}, {}, [&](auto& state, auto& toy, host& ex, auto& comm) {
          auto const before = toy.weights();
          state.nothing_to_add(ex);
          auto const done = state.update(ex, nn::loss_sum{}, {.step = 1, .learning_rate = 0.1});
          wrong[static_cast<std::size_t>(comm.rank())] =
              done.applied || done.gradient_norm != 0 || !same_bits(before, toy.weights());
        });
    CHECK(wrong == std::vector<int>{0, 0});
  }
}

TEST_CASE("Reductions start while backward runs") {
  for (int stage : {0, 1, 2, 3})
    on_states<bf16, float, optim::adamw<host, bf16>>(
        {2, {.stage = stage, .bucket_bytes = 1}}, {}, [&](auto& state, auto& toy, host& ex, auto& comm) {
          (void)comm;
          index_t before_last = 0;
          auto const reduced = [&] {
            auto& meter = state.ranks().gradients.meter();
            return meter.of(stage == 0 ? comm::collective::all_reduce : comm::collective::reduce_scatter)
                .calls;
          };
          auto const at_first = reduced();
          toy.forward(0, 0, 0);
          toy.backward(0, 0, 0, true, [&](std::size_t u) {
            if (u == 1) before_last = reduced() - at_first;
          });
          if (before_last < 4) throw numeric_error("T", site::here(), "no overlap: ", before_last, " calls");
          state.update(ex, nn::loss_sum{1, 1}, {.step = 1, .learning_rate = 0.1});
        });
}

TEST_CASE("Misuse is refused by name") {
  comm::run_threads(1, [](comm::threads& alone) {
    host ex({.threads = 1});
    auto const maps = toy_maps();
    auto const units = toy_units(maps);
    using state_type = zero<comm::threads, host, float, float>;
    zero_ranks<comm::threads> const one{.gradients = alone, .world = alone};
    auto const made_with = [&](std::vector<zero_unit> const& list, zero_options options) {
      return id_thrown_by<config_error>([&] { state_type(one, ex, list, {}, options); });
    };
    CHECK(made_with(units, {.stage = 4}) == "E-parallel-002");
    CHECK(made_with({zero_unit{}}, {}) == "E-parallel-010");
    CHECK(made_with({zero_unit{.map = &maps[0], .tied = 0}}, {}) == "E-parallel-010");
    layout::parameter_map partial;
    partial.add("gain", {8}, layout::parameter_kind::norm_gain, {}, {.copies = 2, .partial = true});
    CHECK(made_with({zero_unit{.map = &partial}}, {}) == "E-parallel-011");

    state_type state(one, ex, units, {}, {.stage = 3});
    CHECK(id_thrown_by<config_error>([&] { state.lend(ex, 99); }) == "E-parallel-003");
    CHECK(id_thrown_by<config_error>([&] { state.gradients_ready(ex, 99); }) == "E-parallel-003");
    CHECK(id_thrown_by<config_error>([&] { state.update(ex, nn::loss_sum{}, {}); }) == "E-parallel-004");
    CHECK(id_thrown_by<config_error>([&] { state.done(1); }) == "E-parallel-015");
    state.nothing_to_add(ex);
    CHECK(id_thrown_by<config_error>([&] { state.gradients_ready(ex, 4); }) == "E-parallel-003");
    state.lend(ex, 1, {.gradients = false});
    CHECK(id_thrown_by<config_error>([&] { state.update(ex, nn::loss_sum{}, {}); }) == "E-parallel-015");
    state.done(1);
    CHECK_FALSE(state.update(ex, nn::loss_sum{}, {}).applied);

    // Units that are never given back: five of one size, and room for three of them.
    std::vector<layout::parameter_map> same(6);
    std::vector<zero_unit> alike;
    for (auto& map : same) {
      map.add("w", {40}, layout::parameter_kind::matrix, {});
      alike.push_back({.map = &map});
    }
    state_type greedy(one, ex, alike, {}, {.stage = 3});
    CHECK(id_thrown_by<config_error>([&] {
            for (std::size_t u = 0; u < 6; ++u) greedy.lend(ex, u, {.gradients = false});
          }) == "E-parallel-012");
    state_type open(one, ex, alike, {}, {.stage = 2, .in_flight = 1});
    CHECK(id_thrown_by<config_error>([&] {
            for (std::size_t u = 0; u < 6; ++u) open.lend(ex, u);
          }) == "E-parallel-012");
  });
}
