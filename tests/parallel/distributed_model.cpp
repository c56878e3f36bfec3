#include <tessera/parallel/distributed_model.hpp>

#include <list>
#include <map>
#include <mutex>
#include <string>

#include <doctest/doctest.h>
#include <nn/fixture.hpp>
#include <support/thrown.hpp>
#include <tessera/comm/threads.hpp>
#include <tessera/exec/host.hpp>

using namespace tessera;
using namespace fixture;
using parallel::training_layout;

namespace {

using host = exec::host;
using distributed = parallel::distributed_model<comm::threads, host, float, float>;

constexpr index_t batch_size = 5, length = 12;

nn::transformer_config model_config(bool llama) {
  auto config = llama ? odd_llama() : odd_gpt2();
  config.layers = 4;
  config.sequence_length = length;
  config.heads = 4;
  config.width = 24;
  config.dropout = llama ? 0.0f : 0.1f;
  return config;
}

/// A rank's positions of a range of samples of step `step`.
class local_batches {
public:
  local_batches(nn::transformer_config const& config, ops::token_positions positions, index_t local)
      : config_(config), positions_(positions), local_(local) {}

  void start(std::uint64_t step) {
    step_ = step;
    kept_.clear();
  }
  parallel::local_samples<host> operator()(layout::range samples) {
    batch const all(batch_size, length, config_.vocabulary_size, step_ + 1);
    auto& mine = kept_.emplace_back();
    for (auto s = samples.begin; s < samples.end; ++s)
      for (index_t i = 0; i < local_; ++i) {
        auto const at = static_cast<std::size_t>(s * length + positions_(i));
        mine.tokens.push_back(all.tokens[at]);
        mine.targets.push_back(all.targets[at]);
      }
    tessera::extents<2> const shape{samples.size(), local_};
    return {{mine.tokens.data(), shape}, {mine.targets.data(), shape}};
  }

private:
  struct part {
    std::vector<std::int32_t> tokens, targets;
  };
  nn::transformer_config config_;
  ops::token_positions positions_;
  index_t local_;
  std::uint64_t step_ = 0;
  std::list<part> kept_;
};

struct outcome {
  std::vector<double> losses, norms;
  double evaluation = 0;
  std::map<std::string, std::vector<float>> weights; ///< Whole parameters.
};

/// Three steps and an evaluation under a layout.
outcome train(bool llama, training_layout const& wanted, int ranks) {
  outcome result;
  std::mutex lock;
  auto const config = model_config(llama);
  comm::run_threads(
      ranks,
      [&](comm::threads& world) {
        host ex({.threads = 1});
        distributed model(world, ex, config, wanted, {.batch = batch_size, .optimizer = {.epsilon = 1e-4}});
        model.initialise(ex, 7);
        local_batches batches(config, model.group().positions(length), model.group().local_sequence(length));
        std::vector<double> losses, norms;
        for (std::uint64_t step = 0; step < 3; ++step) {
          batches.start(step);
          auto const done = model.step(
              ex, batches, {.step = static_cast<index_t>(step) + 1, .learning_rate = 0.01, .clip_norm = 1},
              {.seed = 9, .step = step});
          CHECK(done.applied);
          losses.push_back(parallel::mean_of(done.loss));
          norms.push_back(done.gradient_norm);
        }
        batches.start(0);
        auto const evaluated = model.evaluate(ex, 3, batches);
        std::lock_guard const guard(lock);
        auto& state = model.state();
        for (std::size_t u = 0; u < state.units(); ++u)
          for (auto const& piece : layout::segments_of(state.parameters(u), state.weights_at(u))) {
            auto& whole = result.weights[piece.whole->name];
            whole.resize(static_cast<std::size_t>(piece.whole->whole_size()));
            for (index_t i = 0; i < piece.in_block.size(); ++i)
              whole[static_cast<std::size_t>(piece.first_element + i)] = state.weights(
                  u)[static_cast<std::size_t>(piece.in_block.begin + i - state.weights_at(u).begin)];
          }
        if (!result.losses.empty()) { // every rank knows the same
          CHECK(result.losses == losses);
          CHECK(result.norms == norms);
          CHECK(result.evaluation == parallel::mean_of(evaluated));
        }
        result.losses = losses;
        result.norms = norms;
        result.evaluation = parallel::mean_of(evaluated);
      },
      {.checked = true, .stall_limit = 30});
  return result;
}

void check_same(outcome const& got, outcome const& expected) {
  for (std::size_t i = 0; i < expected.losses.size(); ++i) {
    CHECK(got.losses[i] == doctest::Approx(expected.losses[i]).epsilon(1e-5));
    CHECK(got.norms[i] == doctest::Approx(expected.norms[i]).epsilon(1e-4));
  }
  CHECK(got.evaluation == doctest::Approx(expected.evaluation).epsilon(1e-5));
  REQUIRE(got.weights.size() == expected.weights.size());
  for (auto const& [name, values] : expected.weights) {
    CAPTURE(name);
    CHECK(fixture::distance(got.weights.at(name), values) < 1e-5);
  }
}

} // namespace

// More of them in tests/parallel/layouts.cpp.
TEST_CASE("a model laid over ranks is one rank's model") {
  using enum layout::schedule_kind;
  training_layout const layouts[] = {
      {.pipeline = 2,
       .zero = 3,
       .schedule = interleaved_one_forward_one_backward,
       .chunks = 2,
       .micro_batch = 1,
       .recompute = nn::recomputation::unit},
      {.data = 2, .pipeline = 2, .zero = 2, .schedule = zero_bubble, .micro_batch = 1},
      {.data = 4, .zero = 3, .shard_group = 2, .micro_batch = 1},
      {.data = 2, .tensor = 2, .pipeline = 2, .zero = 3, .sequence_parallel = true, .micro_batch = 1},
      {.data = 2, .pipeline = 2, .context = 2, .zero = 1, .micro_batch = 2},
  };
  for (bool llama : {false, true}) {
    auto const expected = train(llama, {.data = 1, .zero = 0}, 1);
    for (auto const& wanted : layouts) {
      auto const ranks = (std::max)(1, wanted.data) * wanted.tensor * wanted.pipeline * wanted.context;
      CAPTURE(llama);
      CAPTURE(text_of(wanted.mesh()));
      check_same(train(llama, wanted, ranks), expected);
    }
  }
}

TEST_CASE("ZeRO-3 gathers each unit twice a micro-batch under every schedule") {
  auto const config = model_config(true);
  auto const gathered = [&](layout::schedule_kind schedule) {
    std::vector<index_t> bytes(4);
    comm::run_threads(4, [&](comm::threads& world) {
      host ex({.threads = 1});
      distributed model(world, ex, config,
                        {.data = 2, .pipeline = 2, .zero = 3, .schedule = schedule, .micro_batch = 1},
                        {.batch = 4});
      model.initialise(ex, 7);
      local_batches batches(config, model.group().positions(length), length);
      batches.start(0);
      auto& meter = model.state().ranks().gradients.meter();
      meter.reset();
      model.step(ex, batches, {.step = 1, .learning_rate = 0.01}, {});
      bytes[static_cast<std::size_t>(world.rank())] = meter.of(comm::collective::all_gather).bytes;

      index_t weights = 0; // of the units that are not the head, which runs once a micro-batch
      for (std::size_t u = 0; u < model.units().size(); ++u)
        weights += (model.units()[u]->name() == "head" ? 1 : 2) * model.state().parameters(u).block_size();
      CHECK(bytes[static_cast<std::size_t>(world.rank())] <=
            model.layout().micro_batches(4) * weights * static_cast<index_t>(sizeof(float)));
    });
    return bytes;
  };
  auto const usual = gathered(layout::schedule_kind::one_forward_one_backward);
  CHECK(usual[0] > 0);
  CHECK(gathered(layout::schedule_kind::zero_bubble) == usual);
}

TEST_CASE("a rank holds its stage's units, and the last stage a copy of a tied embedding besides") {
  auto const config = model_config(false);
  comm::run_threads(2, [&](comm::threads& world) {
    host ex({.threads = 1});
    distributed model(world, ex, config, {.pipeline = 2, .micro_batch = 1}, {.batch = batch_size});
    std::vector<std::string> names;
    for (auto const& u : model.units()) names.push_back(u->name());
    auto const last = world.rank() == 1;
    CHECK(names == (last ? std::vector<std::string>{"block.2", "block.3", "head"}
                         : std::vector<std::string>{"embedding", "block.0", "block.1"}));
    REQUIRE(model.state().units() == (last ? 4 : 3));
    CHECK(model.number(0) == (last ? 3 : 0));
    if (last) CHECK(model.number(3) == 0);
    if (last) CHECK(model.state().counted(3).empty());
    CHECK(model.layout().micro_batches(batch_size) == batch_size);
    CHECK(model.stages().plan().shape.micro_batches == batch_size);
  });
}

TEST_CASE("a layout that does not fit the ranks is refused by all of them") {
  auto const caught = test::error_of<config_error>([&] {
    comm::run_threads(2, [&](comm::threads& world) {
      host ex({.threads = 1});
      distributed model(world, ex, model_config(true), {.tensor = 3}, {.batch = batch_size});
    });
  });
  CHECK(caught.id == "E-parallel-071");
}

TEST_CASE("every unit is in one part, the embedding in the first and the head in the last") {
  auto const config = model_config(true);
  for (index_t parts : {1, 2, 3, 4}) {
    index_t end = 0;
    for (index_t part = 0; part < parts; ++part) {
      auto const units = parallel::units_of_part(config, parts, part);
      CHECK(units.begin == end);
      CHECK(units.size() > (part == 0 ? 1 : 0));
      end = units.end;
    }
    CHECK(end == nn::unit_count(config));
  }
}
