#include <tessera/parallel/zero.hpp>

#include <mutex>

#include "zero_fixture.hpp"

using namespace tessera;
using namespace fixture;
using parallel::update_result;

TEST_CASE("Ranks, stages, groups, buckets and accumulation do not change a bit of the weights") {
  check_zero_ways<float, float, optim::adamw<host, float>>();
  check_zero_ways<bf16, float, optim::adamw<host, bf16>>();
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
  for (index_t step = 0; step < zero_steps; ++step) {
    auto gradient = toy_gradient(maps, step, zero_samples);
    double squares = 0;
    for (auto& g : gradient) {
      g /= 3 * zero_samples;
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
  for (auto const& how : {zero_way{2, {.stage = 2}}, zero_way{3, {.stage = 3}}})
    for (auto const& found : train_zero<float, float, optim::adamw<host, float>>(how, settings)) {
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
  auto const train_frozen = [&](zero_way how) {
    how.options.frozen = frozen;
    return train_zero<bf16, float, optim::adamw<host, bf16>>(how);
  };
  auto const expected = train_frozen({1, {.stage = 0}}).front();
  auto gradient = toy_gradient(maps, 0, zero_samples);
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
  CHECK(expected.norms[0] == doctest::Approx(std::sqrt(squares) / (3 * zero_samples)).epsilon(1e-12));
  for (auto const& how : {zero_way{2, {.stage = 0}}, zero_way{2, {.stage = 1}}, zero_way{3, {.stage = 2}},
                          zero_way{3, {.stage = 3}}, zero_way{4, {.stage = 3}, 2},
                          zero_way{2, {.stage = 1, .reproducible = true, .micro_batches = 4}}})
    for (auto const& found : train_frozen(how)) {
      CAPTURE(how.options.stage);
      CHECK(same_bits(found.weights, expected.weights));
      CHECK(found.norms == expected.norms);
    }
  zero_way how{2, {.stage = 1, .frozen = frozen}};
  on_zero_states<bf16, float, optim::adamw<host, bf16>>(how, {}, [&](auto& state, auto&, host&, auto&) {
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
      on_zero_states<bf16, float, optim::adamw<host, bf16>>(
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

TEST_CASE("A unit that got no gradient, of some samples or of all, is updated with zeros for those") {
  // Units 1 and 4 run for even samples; unit 3 runs for none, after a first step in which all run.
  auto const train_skipping = [](zero_way const& how) {
    std::vector<float> weights;
    double norm = 0;
    on_zero_states<bf16, float, optim::adamw<host, bf16>>(
        how, {}, [&](auto& state, auto& toy, host& ex, auto& comm) {
          update_result done;
          for (index_t step = 0; step < 2; ++step) {
            toy.skips = [&](index_t sample, std::size_t u) {
              return step > 0 && (u == 3 || (sample % 2 != 0 && (u == 1 || u == 4)));
            };
            auto const mine = 4 / comm.size();
            for (index_t i = 0; i < mine; ++i) // rank 0 of several begins with sample 1
              toy.micro_batch(step, comm.size() * i + (comm.rank() + 1) % comm.size(), i, i + 1 == mine);
            std::vector<nn::loss_sum> const losses(static_cast<std::size_t>(mine), {1, 1});
            done = state.update(ex, losses, {.step = step + 1, .learning_rate = 0.1});
          }
          auto const all = toy.weights();
          if (comm.rank() != 0) return;
          weights = all;
          norm = done.gradient_norm;
        });
    return std::pair(weights, norm);
  };
  auto const expected = train_skipping({1, {.stage = 0}});
  for (int stage : {0, 1, 2, 3})
    for (int ranks : {1, 2, 4}) {
      CAPTURE(stage);
      CAPTURE(ranks);
      CHECK(train_skipping({ranks, {.stage = stage}}) == expected);
      CHECK(train_skipping({ranks, {.stage = stage, .reproducible = true, .micro_batches = 4 / ranks}}) ==
            expected);
    }
}

TEST_CASE("A step in which no rank predicted anything changes nothing") {
  for (int stage : {0, 1, 2, 3}) {
    std::vector<int> wrong(2, -1);
    on_zero_states<float, float, optim::adamw<host, float>>(
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
    on_zero_states<bf16, float, optim::adamw<host, bf16>>(
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
