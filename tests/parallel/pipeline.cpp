#include <tessera/parallel/pipeline.hpp>

#include <mutex>
#include <thread>

#include <doctest/doctest.h>
#include <parallel/pipeline_fixture.hpp>
#include <support/thrown.hpp>
#include <tessera/comm/threads.hpp>

using namespace tessera;
using namespace fixture;
using layout::schedule_kind;
using parallel::pipeline_micro_batch;

namespace {

using micro_batch = pipeline_micro_batch<host>;
using pipe_type = parallel::pipeline<comm::threads, host, float, float>;

/// The units of a stage, chunk by chunk, as even parts of the model.
struct stage_units {
  unit_list units;
  std::vector<layout::range> chunks;

  stage_units(nn::transformer_config const& config, layout::schedule const& plan, int stage,
              nn::recomputation recompute) {
    auto const count = nn::unit_count(config);
    for (int chunk = 0; chunk < plan.shape.chunks; ++chunk) {
      auto const part = layout::shard_of(count, plan.parts(), plan.part_of(stage, chunk));
      auto const begin = std::ssize(units);
      // A single stage makes all of its units at once: its embedding has to know of the head.
      if (plan.shape.stages > 1)
        for (auto& u : nn::make_transformer<host, float, float>(config, nn::one_rank(), part))
          units.push_back(std::move(u));
      chunks.push_back({begin, begin + part.size()});
    }
    if (plan.shape.stages == 1) {
      units = nn::make_transformer<host, float, float>(config);
      for (int chunk = 0; chunk < plan.shape.chunks; ++chunk)
        chunks[static_cast<std::size_t>(chunk)] = layout::shard_of(count, plan.parts(), chunk);
    }
    for (auto& u : units) u->recompute(recompute);
  }
};

/// What the stages of a run gave together.
struct outcome {
  nn::loss_sum loss;
  nn::loss_sum evaluation;
  gradients_by_unit gradients;
  layout::schedule_timeline timeline;
};

struct run_settings {
  nn::recomputation recompute = nn::recomputation::none;
  bool trace = false;
  int runs = 1;
};

void run_stage(comm::threads& stages, nn::transformer_config const& config, one_rank_step& expected,
               layout::schedule const& plan, run_settings settings, outcome& together, std::mutex& lock) {
  host ex({.threads = 1});
  stage_units mine(config, plan, stages.rank(), settings.recompute);
  memory_meter meter;
  pipe_type pipe(
      stages, mine.units, mine.chunks, plan,
      {.width = config.width, .largest = largest_micro_batch, .trace = settings.trace, .meter = &meter});
  CHECK(meter.current(memory_kind::activations) == pipe.planned_bytes());
  auto const supply = [&](index_t i) {
    return micro_batch{.tokens = expected.batches.tokens(i),
                       .targets = expected.batches.targets(i),
                       .first_sample = expected.batches.part(i).begin};
  };
  nn::loss_sum loss, evaluation;
  stage_lender lender(mine.units, expected.model.store());
  for (int i = 0; i < settings.runs; ++i) {
    stage_lender again(mine.units, expected.model.store());
    auto const allocations = meter.allocations();
    pipe.run(ex, again, supply, {.seed = 3, .step = 2});
    CHECK(meter.allocations() == allocations);
    loss = pipe.loss(ex);
    CHECK(again.complete(plan.shape.micro_batches));
    evaluation = pipe.evaluate(ex, again, expected.batches.count(), supply);
    lender = again;
  }
  auto const timeline = settings.trace ? pipe.timeline() : layout::schedule_timeline{};
  std::lock_guard const guard(lock);
  if (stages.rank() + 1 < stages.size()) CHECK(loss.count == 0);
  together.loss += loss;
  together.evaluation += evaluation;
  lender.add_to(together.gradients);
  if (stages.rank() == 0) together.timeline = timeline;
}

outcome run(nn::transformer_config const& config, one_rank_step& expected, layout::schedule const& plan,
            run_settings settings = {}) {
  outcome together;
  std::mutex lock;
  comm::run_threads(
      plan.shape.stages,
      [&](comm::threads& stages) { run_stage(stages, config, expected, plan, settings, together, lock); },
      {.checked = true, .stall_limit = 20});
  return together;
}

constexpr schedule_kind kinds[] = {schedule_kind::gpipe, schedule_kind::one_forward_one_backward,
                                   schedule_kind::interleaved_one_forward_one_backward,
                                   schedule_kind::zero_bubble};

layout::schedule plan_of(schedule_kind kind, int stages, int micro_batches) {
  auto const chunks = kind == schedule_kind::interleaved_one_forward_one_backward ? 2 : 1;
  return layout::make_schedule(kind, {stages, micro_batches, chunks});
}

} // namespace

TEST_CASE("every schedule on 1, 2 and 4 stages gives one rank's loss and gradients, recomputed or not") {
  for (auto const& config : {pipeline_gpt2(), pipeline_llama()})
    for (int m : {1, 2, 4, 5}) {
      one_rank_step expected(config, m);
      host ex({.threads = 1});
      nn::loss_sum evaluation;
      for (index_t i = 0; i < m; ++i)
        evaluation += expected.model.evaluate(ex, expected.batches.tokens(i), expected.batches.targets(i));
      for (int p : {1, 2, 4})
        for (auto kind : kinds)
          for (auto recompute :
               {nn::recomputation::none, nn::recomputation::attention, nn::recomputation::unit}) {
            CAPTURE(m);
            CAPTURE(p);
            CAPTURE(name_of(kind));
            CAPTURE(name_of(recompute));
            auto const got = run(config, expected, plan_of(kind, p, m), {.recompute = recompute});
            CHECK(got.loss.count == expected.loss.count);
            CHECK(got.loss.sum == doctest::Approx(expected.loss.sum).epsilon(1e-6));
            CHECK(got.evaluation.count == evaluation.count);
            CHECK(got.evaluation.sum == doctest::Approx(evaluation.sum).epsilon(1e-6));
            CHECK(fixture::distance(got.gradients, expected.gradients) < 1e-5);
          }
    }
}

TEST_CASE("a run is the same bits as another, and as under another schedule") {
  auto const config = pipeline_llama();
  one_rank_step expected(config, 5);
  auto const first = run(config, expected, plan_of(schedule_kind::gpipe, 2, 5));
  for (auto kind :
       {schedule_kind::gpipe, schedule_kind::one_forward_one_backward, schedule_kind::zero_bubble}) {
    auto const again = run(config, expected, plan_of(kind, 2, 5), {.runs = 2});
    CHECK(again.loss.sum == first.loss.sum);
    CHECK(again.gradients == first.gradients);
  }
}

TEST_CASE(
    "a traced run has the plan's order, causes before effects, and in unit times the published bubble") {
  auto const config = pipeline_gpt2();
  constexpr int p = 4, m = 8;
  one_rank_step expected(config, m);
  for (auto kind : kinds) {
    CAPTURE(name_of(kind));
    auto const plan = plan_of(kind, p, m);
    auto const got = run(config, expected, plan, {.trace = true});
    layout::schedule measured{plan.shape, {}};
    std::vector<std::map<std::pair<int, int>, layout::timed_action>> sent(2);
    for (auto const& stage : got.timeline.stages) {
      measured.actions.emplace_back();
      double before = 0;
      for (auto const& a : stage) {
        CHECK(a.begin >= before);
        CHECK(a.end >= a.begin);
        before = a.end;
        measured.actions.back().push_back(a.what);
      }
    }
    CHECK(measured.actions == plan.actions);
    for (int stage = 0; stage < p; ++stage) // no message is there before it was sent
      for (auto const& a : got.timeline.stages[static_cast<std::size_t>(stage)]) {
        if (!layout::receives(a.what.kind)) continue;
        auto const from = plan.peer_of(stage, a.what);
        auto const kind_sent = a.what.kind == layout::action_kind::receive_gradient
                                   ? layout::action_kind::send_gradient
                                   : layout::action_kind::send_activation;
        for (auto const& b : got.timeline.stages[static_cast<std::size_t>(from.stage)])
          if (b.what == layout::action{kind_sent, a.what.micro_batch, from.chunk}) CHECK(b.begin <= a.end);
      }
    CHECK(got.timeline.bubble_share() > 0);

    auto const run = layout::simulate(measured, layout::schedule_durations{1, 1, 1});
    auto const chunks = static_cast<double>(plan.shape.chunks);
    if (kind == schedule_kind::zero_bubble)
      CHECK(run.length() - 3 * m == p - 1);
    else
      CHECK(run.bubble_share() == (p - 1) / (chunks * m + p - 1));
    for (int stage = 0; stage < p; ++stage)
      if (kind == schedule_kind::one_forward_one_backward)
        CHECK(run.most_live(stage) == (std::min)(m, p - stage));
  }
}

TEST_CASE("a stage keeps as many micro-batches as its schedule says, and no more memory than planned") {
  auto const config = pipeline_llama();
  comm::run_threads(4, [&](comm::threads& stages) {
    index_t bytes[4];
    int slots[4];
    for (auto kind : kinds) {
      auto const plan = plan_of(kind, 4, 8);
      stage_units mine(config, plan, stages.rank(), nn::recomputation::none);
      pipe_type pipe(stages, mine.units, mine.chunks, plan,
                     {.width = config.width, .largest = largest_micro_batch});
      slots[static_cast<int>(kind)] = pipe.runner().slots();
      bytes[static_cast<int>(kind)] = pipe.planned_bytes();
    }
    CHECK(slots[0] == 8);
    CHECK(slots[1] == 4 - stages.rank());
    CHECK(slots[2] == 2 * (3 - stages.rank()) + 5);
    CHECK(slots[3] == 4);
    CHECK(bytes[1] < bytes[0]);
  });
}

TEST_CASE("recomputation keeps less") {
  auto const config = pipeline_gpt2();
  index_t bytes[3];
  comm::run_threads(1, [&](comm::threads& alone) {
    for (auto what : {nn::recomputation::none, nn::recomputation::attention, nn::recomputation::unit}) {
      auto const plan = layout::make_schedule(schedule_kind::gpipe, {.micro_batches = 8});
      stage_units mine(config, plan, 0, what);
      pipe_type pipe(alone, mine.units, mine.chunks, plan,
                     {.width = config.width, .largest = largest_micro_batch});
      bytes[static_cast<int>(what)] = pipe.planned_bytes();
    }
  });
  CHECK(bytes[1] < bytes[0]);
  CHECK(bytes[2] * 4 < bytes[0]); // one row a block and micro-batch instead of sixteen
}

TEST_CASE("a stage that throws ends the others at once") {
  auto const config = pipeline_llama();
  one_rank_step expected(config, 4);
  for (auto kind : kinds)
    for (int thrower : {0, 1, 3}) {
      auto const plan = plan_of(kind, 4, 4);
      int ended = 0;
      std::mutex lock;
      auto const caught = test::error_of<numeric_error>([&] {
        comm::run_threads(4,
                          [&](comm::threads& stages) {
                            host ex({.threads = 1});
                            stage_units mine(config, plan, stages.rank(), nn::recomputation::none);
                            pipe_type pipe(stages, mine.units, mine.chunks, plan,
                                           {.width = config.width, .largest = largest_micro_batch});
                            stage_lender lender(mine.units, expected.model.store());
                            try {
                              pipe.run(ex, lender, [&](index_t i) {
                                if (stages.rank() == thrower && i == 2)
                                  throw numeric_error("E-test-001", site::here(), "planted");
                                return micro_batch{.tokens = expected.batches.tokens(i),
                                                   .targets = expected.batches.targets(i)};
                              });
                            } catch (error const&) {
                              std::lock_guard const guard(lock);
                              ++ended;
                              throw;
                            }
                          },
                          {.checked = true, .stall_limit = 20});
      });
      CHECK(caught.id == "E-test-001");
      CHECK(ended >= 1); // the others throw peer_failed, or had sent and received all they had to
    }
}

TEST_CASE("a stage that never comes is named by the watchdog") {
  auto const config = pipeline_llama();
  one_rank_step expected(config, 2);
  auto const caught = test::error_of<stalled>([&] {
    comm::run_threads(2,
                      [&](comm::threads& stages) {
                        host ex({.threads = 1});
                        auto const plan = plan_of(schedule_kind::one_forward_one_backward, 2, 2);
                        stage_units mine(config, plan, stages.rank(), nn::recomputation::none);
                        pipe_type pipe(stages, mine.units, mine.chunks, plan,
                                       {.width = config.width, .largest = largest_micro_batch});
                        stage_lender lender(mine.units, expected.model.store());
                        if (stages.rank() == 1) std::this_thread::sleep_for(std::chrono::milliseconds(600));
                        pipe.run(ex, lender, [&](index_t i) {
                          return micro_batch{.tokens = expected.batches.tokens(i),
                                             .targets = expected.batches.targets(i)};
                        });
                      },
                      {.stall_limit = 0.1});
  });
  CHECK(caught.says("receive"));
  CHECK(caught.says("rank 1"));
}

TEST_CASE("plans and micro-batches that do not fit are refused") {
  auto const config = pipeline_llama();
  one_rank_step expected(config, 1);
  auto const make = [&](layout::schedule plan, layout::schedule const& units_of, nn::batch_shape largest) {
    comm::run_threads(1, [&](comm::threads& alone) {
      host ex({.threads = 1});
      stage_units mine(config, units_of, 0, nn::recomputation::none);
      pipe_type pipe(alone, mine.units, mine.chunks, std::move(plan),
                     {.width = config.width, .largest = largest});
      stage_lender lender(mine.units, expected.model.store());
      pipe.run(ex, lender, [&](index_t i) {
        return micro_batch{.tokens = expected.batches.tokens(i), .targets = expected.batches.targets(i)};
      });
      (void)pipe.timeline();
    });
  };
  auto const one = layout::make_schedule(schedule_kind::gpipe, {});
  auto const two_chunks = plan_of(schedule_kind::interleaved_one_forward_one_backward, 1, 1);
  auto caught = test::error_of<config_error>([&] {
    make(plan_of(schedule_kind::gpipe, 2, 1), one, {2, 11});
  });
  CHECK(caught.id == "E-parallel-083");
  caught = test::error_of<config_error>([&] { make(one, two_chunks, {2, 11}); });
  CHECK(caught.id == "E-parallel-083");
  auto broken = one;
  broken.actions[0].pop_back();
  caught = test::error_of<config_error>([&] { make(broken, one, {2, 11}); });
  CHECK(caught.id == "E-layout-043");
  auto const too_large = test::error_of<size_error>([&] { make(one, one, {1, 11}); });
  CHECK(too_large.id == "E-parallel-081");
  CHECK(too_large.says("2 samples of 11 tokens"));
  caught = test::error_of<config_error>([&] { make(one, one, {2, 11}); });
  CHECK(caught.id == "E-parallel-085");
  CHECK(caught.says("pipeline_options::trace"));
}
