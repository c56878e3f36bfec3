#include <tessera/layout/schedule_simulator.hpp>

#include <algorithm>
#include <string>

#include <doctest/doctest.h>
#include <support/thrown.hpp>

using namespace tessera;
using namespace tessera::layout;

namespace {

constexpr auto gpipe = schedule_kind::gpipe;
constexpr auto one_f_one_b = schedule_kind::one_forward_one_backward;
constexpr auto interleaved = schedule_kind::interleaved_one_forward_one_backward;
constexpr auto zero_bubble = schedule_kind::zero_bubble;

constexpr int stage_counts[] = {1, 2, 3, 4, 7, 8};
constexpr int micro_batch_counts[] = {1, 2, 3, 4, 5, 8, 16, 31};

/// Both sides of `idle / all == bubble_numerator / bubble_denominator`, multiplied out: the times of whole
/// numbers are exact.
bool has_bubble(schedule_timeline const& run, double numerator, double denominator) {
  double idle = run.length() * static_cast<double>(run.stages.size());
  auto const all = idle;
  for (int s = 0; s < static_cast<int>(run.stages.size()); ++s) idle -= run.busy(s);
  CHECK(run.bubble_share() == doctest::Approx(numerator / denominator));
  return idle * denominator == all * numerator;
}

/// A plan of two stages, written out: each list of actions in chunk 0.
schedule two_stages(int micro_batches, std::vector<action> first, std::vector<action> second) {
  return {{2, micro_batches, 1}, {std::move(first), std::move(second)}};
}

std::vector<action>& list_of(schedule& plan, int stage) {
  return plan.actions[static_cast<std::size_t>(stage)];
}

std::vector<schedule> all_schedules(int stages, int micro_batches) {
  std::vector<schedule> plans;
  for (auto kind : {gpipe, one_f_one_b, zero_bubble})
    plans.push_back(make_schedule(kind, {stages, micro_batches, 1}));
  for (int chunks : {2, 3}) plans.push_back(make_schedule(interleaved, {stages, micro_batches, chunks}));
  return plans;
}

} // namespace

TEST_CASE("every schedule ends, with more or fewer micro-batches than stages") {
  for (int p : stage_counts)
    for (int m : micro_batch_counts)
      for (auto const& plan : all_schedules(p, m))
        for (int in_flight : {0, 1, 2}) {
          auto const run = simulate(plan, schedule_durations{2, 3, 1, 0.5}, {in_flight});
          for (int s = 0; s < p; ++s)
            CHECK(run.stages[static_cast<std::size_t>(s)].size() ==
                  plan.actions[static_cast<std::size_t>(s)].size());
        }
}

TEST_CASE("the bubble of GPipe and of 1F1B is (p - 1) / (m + p - 1)") {
  for (auto kind : {gpipe, one_f_one_b})
    for (int p : stage_counts)
      for (int m : micro_batch_counts)
        for (auto d : {schedule_durations{1, 1, 1}, schedule_durations{5, 3, 4}})
          CHECK(has_bubble(simulate(make_schedule(kind, {p, m, 1}), d), p - 1, m + p - 1));
}

TEST_CASE("the bubble of interleaved 1F1B is (p - 1) / (v m + p - 1) for micro-batches in whole groups") {
  for (int p : stage_counts)
    for (int v : {2, 3, 4})
      for (int groups : {1, 2, 3, 7}) {
        auto const m = groups * p;
        for (auto d : {schedule_durations{1, 1, 1}, schedule_durations{3, 4, 2}})
          CHECK(has_bubble(simulate(make_schedule(interleaved, {p, m, v}), d), p - 1, v * m + p - 1));
      }
}

TEST_CASE("ZB-H1 leaves each stage idle for (p - 1) (Tf + Tb - Tw), once there is a micro-batch a stage") {
  for (int p : stage_counts)
    for (int m : micro_batch_counts)
      for (auto d : {schedule_durations{1, 1, 1}, schedule_durations{2, 2, 1}, schedule_durations{3, 4, 2}}) {
        auto const run = simulate(make_schedule(zero_bubble, {p, m, 1}), d);
        auto const work = m * (d.forward + d.backward_input + d.backward_weights);
        CHECK(run.length() - work ==
              (p - 1) * (d.forward + d.backward_input) - ((std::min)(m, p) - 1) * d.backward_weights);
        auto const plain = simulate(make_schedule(one_f_one_b, {p, m, 1}), d);
        CHECK(run.bubble_share() <= plain.bubble_share());
      }
}

TEST_CASE("a stage of 1F1B keeps at most min(m, p - stage) micro-batches, one of GPipe all of them") {
  for (int p : stage_counts)
    for (int m : micro_batch_counts) {
      auto const plain = simulate(make_schedule(one_f_one_b, {p, m, 1}));
      auto const all = simulate(make_schedule(gpipe, {p, m, 1}));
      for (int s = 0; s < p; ++s) {
        CHECK(plain.most_live(s) == (std::min)(m, p - s));
        CHECK(all.most_live(s) == m);
      }
    }
}

TEST_CASE("no stage of ZB-H1 keeps more than the first stage of 1F1B") {
  for (int p : stage_counts)
    for (int m : micro_batch_counts) {
      auto const run = simulate(make_schedule(zero_bubble, {p, m, 1}));
      for (int s = 0; s < p; ++s) CHECK(run.most_live(s) <= (std::min)(m, p));
      CHECK(run.most_live(0) == (std::min)(m, p));
    }
}

TEST_CASE("a stage of interleaved 1F1B keeps 2 (p - stage - 1) + (v - 1) p + 1 chunks of micro-batches") {
  for (int p : stage_counts)
    for (int v : {2, 3})
      for (int groups : {1, 2, 5}) {
        auto const m = groups * p;
        auto const run = simulate(make_schedule(interleaved, {p, m, v}));
        for (int s = 0; s < p; ++s)
          CHECK(run.most_live(s) == (std::min)(v * m, 2 * (p - s - 1) + (v - 1) * p + 1));
      }
}

TEST_CASE("the timeline of a small case is the one drawn by hand") {
  // stage 0: F0 F1 .. B0 B0 B1 B1     stage 1: .. F0 B0 B0 F1 B1 B1
  auto const run = simulate(make_schedule(one_f_one_b, {2, 2, 1}), schedule_durations{1, 1, 1});
  struct expected {
    action what;
    double begin, end;
  };
  auto const check = [&](std::size_t stage, std::vector<expected> const& wanted) {
    std::size_t at = 0;
    for (auto const& a : run.stages[stage]) {
      if (!computes(a.what.kind)) continue;
      REQUIRE(at < wanted.size());
      CHECK(a.what == wanted[at].what);
      CHECK(a.begin == wanted[at].begin);
      CHECK(a.end == wanted[at].end);
      ++at;
    }
    CHECK(at == wanted.size());
  };
  using enum action_kind;
  check(
      0,
      {{{forward, 0, 0}, 0, 1}, {{forward, 1, 0}, 1, 2}, {{backward, 0, 0}, 4, 6}, {{backward, 1, 0}, 7, 9}});
  check(
      1,
      {{{forward, 0, 0}, 1, 2}, {{backward, 0, 0}, 2, 4}, {{forward, 1, 0}, 4, 5}, {{backward, 1, 0}, 5, 7}});
  CHECK(run.length() == 9);
}

TEST_CASE("durations may differ by stage, and messages take their time") {
  auto const plan = make_schedule(gpipe, {2, 1, 1});
  auto const run = simulate(plan, [](int stage, action a) {
    return sends(a.kind) ? 0.25 : stage == 0 ? 1.0 : 10.0;
  });
  CHECK(run.length() == 1 + 0.25 + 10 + 10 + 0.25 + 1);
  CHECK(run.busy(1) == 20);
}

TEST_CASE("a deadlock is found, and says who waits for what") {
  using enum action_kind;
  // Stage 0 wants the gradient of micro-batch 0 before it sends micro-batch 1; stage 1 wants both forwards
  // before it begins a backward.
  auto const plan = two_stages(2,
                               {{forward, 0},
                                {send_activation, 0},
                                {receive_gradient, 0},
                                {backward, 0},
                                {forward, 1},
                                {send_activation, 1},
                                {receive_gradient, 1},
                                {backward, 1}},
                               {{receive_activation, 0},
                                {forward, 0},
                                {receive_activation, 1},
                                {forward, 1},
                                {backward, 0},
                                {send_gradient, 0},
                                {backward, 1},
                                {send_gradient, 1}});
  auto const caught = test::error_of<config_error>([&] { simulate(plan); });
  CHECK(caught.id == "E-layout-045");
  CHECK(caught.says("stage 0 in its receive_gradient of micro-batch 0 in chunk 0 from stage 1"));
  CHECK(caught.says("stage 1 in its receive_activation of micro-batch 1 in chunk 0 from stage 0"));
}

TEST_CASE("a plan that needs more messages under way than there are buffers for deadlocks") {
  using enum action_kind;
  // All of chunk 0, then all of chunk 1: stage 0 takes nothing from stage 1 until it has sent everything.
  constexpr int m = 6;
  schedule plan{{2, m, 2}, std::vector<std::vector<action>>(2)};
  auto const add = [&](int stage, int micro_batch, int chunk, bool backwards) {
    layout::detail::append_with_messages(plan, stage, {backwards ? backward : forward, micro_batch, chunk});
  };
  for (int stage = 0; stage < 2; ++stage) {
    for (int chunk : {0, 1})
      for (int i = 0; i < m; ++i) add(stage, i, chunk, false);
    for (int chunk : {1, 0})
      for (int i = 0; i < m; ++i) add(stage, i, chunk, true);
  }
  CHECK(simulate(plan, schedule_durations{}, {.in_flight = 0}).length() > 0);
  auto const caught =
      test::error_of<config_error>([&] { simulate(plan, schedule_durations{}, {.in_flight = 2}); });
  CHECK(caught.id == "E-layout-045");
  CHECK(caught.says("stage 0 in its send_activation of micro-batch 5 in chunk 0 to stage 1"));
  CHECK(caught.says("stage 1 in its send_activation of micro-batch 2 in chunk 0 to stage 0"));
}

TEST_CASE("any one action that is left out, doubled or unknown is named") {
  for (auto const& whole : all_schedules(3, 3))
    for (int stage = 0; stage < 3; ++stage)
      for (std::size_t i = 0; i < whole.actions[static_cast<std::size_t>(stage)].size(); ++i) {
        auto plan = whole;
        auto& list = list_of(plan, stage);
        auto const planted = list[i];
        auto const place = "stage " + std::to_string(stage);

        list.erase(list.begin() + static_cast<std::ptrdiff_t>(i));
        auto caught = test::error_of<config_error>([&] { simulate(plan); });
        // Half of a backward without the other is named by the half that is missing.
        CHECK(caught.id == "E-layout-043");
        CHECK(caught.says(place + " lacks the " + text_of(planted)));

        plan = whole;
        list.push_back(planted);
        caught = test::error_of<config_error>([&] { simulate(plan); });
        CHECK(caught.id == "E-layout-043");
        CHECK(caught.says(place + " does the " + text_of(planted) + " twice"));

        plan = whole;
        list[i].micro_batch = 3;
        caught = test::error_of<config_error>([&] { simulate(plan); });
        CHECK(caught.id == "E-layout-042");
        CHECK(caught.says(place + " has a " + text_of(list[i])));
      }
}

TEST_CASE("a message that has no other end, and a backward that is done whole and in halves, are refused") {
  auto plan = make_schedule(one_f_one_b, {2, 1, 1});
  list_of(plan, 0).push_back({action_kind::receive_activation, 0, 0});
  CHECK(test::error_of<config_error>([&] { simulate(plan); }).id == "E-layout-042");
  plan = make_schedule(zero_bubble, {2, 1, 1});
  list_of(plan, 0).push_back({action_kind::backward, 0, 0});
  CHECK(test::error_of<config_error>([&] { simulate(plan); }).id == "E-layout-042");
}

TEST_CASE("any two neighbours of a list that must not change places are found") {
  for (auto const& whole : all_schedules(2, 2))
    for (int stage = 0; stage < 2; ++stage)
      for (std::size_t i = 0; i + 1 < whole.actions[static_cast<std::size_t>(stage)].size(); ++i) {
        auto plan = whole;
        auto& list = list_of(plan, stage);
        auto const first = list[i], second = list[i + 1];
        if (first.micro_batch != second.micro_batch || first.chunk != second.chunk) continue;
        bool const free = (first.kind == action_kind::send_activation) // before a gradient or a backward
                          || second.kind == action_kind::backward_weights ||
                          first.kind == action_kind::send_gradient;
        if (free) continue;
        std::swap(list[i], list[i + 1]);
        auto const caught = test::error_of<config_error>([&] { simulate(plan); });
        CHECK(caught.id == "E-layout-044");
        CHECK(caught.says("does the " + text_of(second) + " before the " + text_of(first)));
      }
}

TEST_CASE("micro-batches of a chunk are worked on in ascending order") {
  auto plan = make_schedule(gpipe, {1, 2, 1});
  std::swap(list_of(plan, 0)[2], list_of(plan, 0)[3]);
  auto const caught = test::error_of<config_error>([&] { simulate(plan); });
  CHECK(caught.id == "E-layout-044");
  CHECK(caught.says("does the backward of micro-batch 1 in chunk 0 before the backward of micro-batch 0"));
}

TEST_CASE(
    "on one stage a chunk's forward comes after that of the chunk before, and backwards the other way") {
  auto plan = make_schedule(interleaved, {1, 1, 2});
  REQUIRE(list_of(plan, 0).size() == 4);
  std::swap(list_of(plan, 0)[0], list_of(plan, 0)[1]);
  CHECK(test::error_of<config_error>([&] { simulate(plan); }).id == "E-layout-044");
  std::swap(list_of(plan, 0)[0], list_of(plan, 0)[1]);
  std::swap(list_of(plan, 0)[2], list_of(plan, 0)[3]);
  CHECK(test::error_of<config_error>([&] { simulate(plan); }).id == "E-layout-044");
}

TEST_CASE("messages that the other end takes in another order are found") {
  using enum action_kind;
  // Chunks 0 and 1 of stage 0 in another order than stage 1 expects them.
  auto plan = make_schedule(interleaved, {2, 2, 2});
  auto& list = list_of(plan, 1);
  auto const at = [&](action a) { return std::find(list.begin(), list.end(), a); };
  std::iter_swap(at({receive_activation, 1, 0}), at({receive_activation, 0, 1}));
  std::iter_swap(at({forward, 1, 0}), at({forward, 0, 1}));
  std::iter_swap(at({send_activation, 1, 0}), at({backward, 0, 1}));
  auto const caught = test::error_of<config_error>([&] { simulate(plan); });
  CHECK((caught.id == "E-layout-044" || caught.id == "E-layout-045"));
}

TEST_CASE("a plan needs a list for each stage") {
  auto plan = make_schedule(gpipe, {2, 1, 1});
  plan.actions.pop_back();
  CHECK(test::error_of<config_error>([&] { simulate(plan); }).id == "E-layout-040");
}
