/// A pipeline of two stages whose last one borrows the first one's table: the same bits as on one rank.
#include <tessera/parallel/detail/shared_block.hpp>

#include "../zero_fixture.hpp"

using namespace tessera;
using namespace fixture;

namespace {

using state_type = zero<comm::threads, host, bf16, float>;
constexpr index_t samples = 4, steps = 2;

struct outcome {
  std::vector<std::vector<float>> units; ///< Those of toy_maps(), then the borrowed copy.
  std::vector<double> norms;
};

std::vector<float> as_floats(std::span<bf16 const> values) {
  std::vector<float> floats;
  for (auto v : values) floats.push_back(static_cast<float>(v));
  return floats;
}

outcome on_one_rank(std::vector<layout::parameter_map> const& maps) {
  outcome found;
  comm::run_threads(1, [&](comm::threads& comm) {
    host ex({.threads = 1});
    state_type state({.gradients = comm, .world = comm}, ex, toy_units(maps), {}, {.stage = 0});
    toy_rank<state_type> toy(state, ex, maps);
    toy.start();
    for (index_t step = 0; step < steps; ++step) {
      for (index_t s = 0; s < samples; ++s) toy.micro_batch(step, s, s, s + 1 == samples);
      auto const done = state.update(ex, nn::loss_sum{1, samples},
                                     {.step = step + 1, .learning_rate = 0.01, .clip_norm = 1});
      found.norms.push_back(done.gradient_norm);
    }
    for (std::size_t u = 0; u < maps.size(); ++u) found.units.push_back(as_floats(state.weights(u)));
    found.units.push_back(found.units[0]);
  });
  return found;
}

/// Ranks: stage * data + number among the data ranks.
outcome on_two_stages(std::vector<layout::parameter_map> const& maps, int data, zero_options const& options) {
  outcome found;
  found.units.resize(7);
  std::vector<std::string> wrong;
  comm::run_threads(2 * data, [&](comm::threads& world) {
    host ex({.threads = 1});
    auto const last = world.rank() >= data;
    auto shards = world.split(last ? 1 : 0, world.rank());
    auto pipeline = world.split(world.rank() % data, world.rank());
    std::vector<std::size_t> const numbers =
        last ? std::vector<std::size_t>{3, 4, 5, 0} : std::vector<std::size_t>{0, 1, 2};
    std::vector<zero_unit> units;
    for (auto u : numbers) units.push_back({.map = &maps[u], .number = u});
    if (last) {
      units[2].tied = 3;
      units[3].owned = false;
    }
    memory_meter meter;
    auto metered = options;
    metered.meter = &meter;
    zero_ranks<comm::threads> groups{.gradients = shards, .world = world};
    groups.shared_block = {&pipeline, last ? 0 : 1, last ? 3u : 0u};
    state_type state(groups, ex, units, {}, metered);
    auto const starts = toy_starts(maps);
    state.start_from(ex, [&](std::size_t u, layout::range part, std::span<float> out) {
      std::fill(out.begin(), out.end(), 0.0f);
      for (auto const& s : layout::segments_of(*units[u].map, part))
        for (auto e = s.in_block.begin; e < s.in_block.end; ++e)
          out[static_cast<std::size_t>(e - part.begin)] =
              first_value(starts[numbers[u]] + static_cast<std::size_t>(e));
    });
    auto const mine = samples / data;
    for (index_t step = 0; step < steps; ++step) {
      for (index_t i = 0; i < mine; ++i)
        for (auto u = last ? 3u : numbers.size(); u-- > 0;) {
          auto const sample = (world.rank() % data) * mine + i;
          auto const lent = state.lend(ex, u, {.micro_batch = i});
          auto const write = [&](std::span<float> block, layout::parameter const& p, std::size_t unit,
                                 index_t of, bool adds) {
            for (auto e = p.where().begin; e < p.where().end; ++e) {
              auto& g = block[static_cast<std::size_t>(e)];
              g = (adds ? g : 0) + gradient_of(step, of, static_cast<index_t>(starts[unit]) + e);
            }
          };
          for (std::size_t p = 0; p < units[u].map->size(); ++p)
            write(lent.gradients, (*units[u].map)[p], numbers[u], sample,
                  state.accumulates(i) ||
                      (numbers[u] == 0 && p == 0)); // as the embedding of a tied head does
          if (!lent.tied_gradients.empty())
            write(lent.tied_gradients, maps[0][0], 0, sample + 1000, state.accumulates(i));
          state.done(u);
          state.gradients_ready(ex, u, i + 1 == mine);
        }
      // The loss is known to the last stage alone.
      std::vector<nn::loss_sum> const losses(static_cast<std::size_t>(mine), {0.25, 1});
      auto const done = state.update(ex, last ? losses : std::vector<nn::loss_sum>{},
                                     {.step = step + 1, .learning_rate = 0.01, .clip_norm = 1});
      if (world.rank() == 0) found.norms.push_back(done.gradient_norm);
    }
    auto const plan = state.plan({});
    for (auto kind : {memory_kind::parameters, memory_kind::gradients, memory_kind::optimizer_state})
      if (meter.peak(kind) != plan.of(kind))
        throw numeric_error("T", site::here(), "another plan for ", name_of(kind));
    auto const communication = meter.peak(memory_kind::communication) +
                               shards.memory().peak(memory_kind::communication) +
                               world.memory().peak(memory_kind::communication);
    // Splitting the world takes memory of its communicator as well.
    if (communication > plan.communication + 1024)
      throw numeric_error("T", site::here(), "communication took ", communication, " of ",
                          plan.communication);
    if (last && !state.stretches(3).empty())
      throw numeric_error("T", site::here(), "state of a borrowed block");
    if (last && !state.counted(3).empty())
      throw numeric_error("T", site::here(), "a borrowed block is counted");
    for (std::size_t u = 0; u < numbers.size(); ++u) {
      auto const lent = state.lend(ex, u, {.gradients = false});
      if (world.rank() % data == 0) found.units[last && u == 3 ? 6 : numbers[u]] = as_floats(lent.weights);
      state.done(u);
    }
  });
  return found;
}

} // namespace

TEST_CASE(
    "A block shared by the first and the last stage ends as it does on one rank, under every stage of ZeRO") {
  auto const maps = toy_maps();
  auto const expected = on_one_rank(maps);
  for (int stage : {0, 1, 2, 3})
    for (int data : {1, 2})
      for (bool reproducible : {false, true}) {
        CAPTURE(stage);
        CAPTURE(data);
        CAPTURE(reproducible);
        auto const found = on_two_stages(maps, data,
                                         {.stage = stage,
                                          .bucket_bytes = 512,
                                          .in_flight = 1,
                                          .reproducible = reproducible,
                                          .micro_batches = samples / data});
        CHECK(found.norms == expected.norms);
        for (std::size_t u = 0; u < found.units.size(); ++u) {
          CAPTURE(u);
          CHECK(same_bits(found.units[u], expected.units[u]));
        }
      }
}

TEST_CASE("A shared block that does not exist is refused") {
  auto const maps = toy_maps();
  comm::run_threads(1, [&](comm::threads& comm) {
    host ex({.threads = 1});
    zero_ranks<comm::threads> groups{.gradients = comm, .world = comm};
    groups.shared_block = {&comm, 0, 9};
    if (id_thrown_by<config_error>([&] { state_type(groups, ex, toy_units(maps), {}); }) != "E-parallel-010")
      throw numeric_error("T", site::here(), "accepted");
  });
}
