#include <tessera/layout/schedule.hpp>

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

/// The computations of a stage as "F0 F1 B0 I1 W1", with "F0.1" for those of chunk 1.
std::string computations(schedule const& plan, int stage) {
  std::string text;
  for (auto a : plan.actions[static_cast<std::size_t>(stage)]) {
    if (!computes(a.kind)) continue;
    text += text.empty() ? "" : " ";
    text += "FBIW"[static_cast<int>(a.kind)];
    text += std::to_string(a.micro_batch);
    if (plan.shape.chunks > 1) text += "." + std::to_string(a.chunk);
  }
  return text;
}

std::string everything(schedule const& plan, int stage) {
  std::string text;
  for (auto a : plan.actions[static_cast<std::size_t>(stage)]) text += text_of(a) + "\n";
  return text;
}

} // namespace

TEST_CASE("GPipe does all forwards, then all backwards, both in ascending order") {
  auto const plan = make_schedule(gpipe, {.stages = 3, .micro_batches = 4});
  for (int stage = 0; stage < 3; ++stage) CHECK(computations(plan, stage) == "F0 F1 F2 F3 B0 B1 B2 B3");
}

TEST_CASE("1F1B begins with a forward for each later stage and then alternates") {
  auto const plan = make_schedule(one_f_one_b, {.stages = 4, .micro_batches = 6});
  CHECK(computations(plan, 0) == "F0 F1 F2 F3 B0 F4 B1 F5 B2 B3 B4 B5");
  CHECK(computations(plan, 1) == "F0 F1 F2 B0 F3 B1 F4 B2 F5 B3 B4 B5");
  CHECK(computations(plan, 2) == "F0 F1 B0 F2 B1 F3 B2 F4 B3 F5 B4 B5");
  CHECK(computations(plan, 3) == "F0 B0 F1 B1 F2 B2 F3 B3 F4 B4 F5 B5");
}

TEST_CASE(
    "interleaved 1F1B takes groups of as many micro-batches as stages through one chunk after another") {
  // The published example: 2 stages, 2 chunks, 4 micro-batches.
  auto const plan = make_schedule(interleaved, {.stages = 2, .micro_batches = 4, .chunks = 2});
  CHECK(computations(plan, 0) ==
        "F0.0 F1.0 F0.1 F1.1 F2.0 B0.1 F3.0 B1.1 F2.1 B0.0 F3.1 B1.0 B2.1 B3.1 B2.0 B3.0");
  CHECK(computations(plan, 1) ==
        "F0.0 F1.0 F0.1 B0.1 F1.1 B1.1 F2.0 B0.0 F3.0 B1.0 F2.1 B2.1 F3.1 B3.1 B2.0 B3.0");
}

TEST_CASE("a last group of fewer micro-batches than stages keeps the order of a full one") {
  auto const plan = make_schedule(interleaved, {.stages = 2, .micro_batches = 3, .chunks = 2});
  CHECK(computations(plan, 0) == "F0.0 F1.0 F0.1 F1.1 F2.0 B0.1 B1.1 F2.1 B0.0 B1.0 B2.1 B2.0");
  CHECK(computations(plan, 1) == "F0.0 F1.0 F0.1 B0.1 F1.1 B1.1 F2.0 B0.0 B1.0 F2.1 B2.1 B2.0");
}

TEST_CASE("ZB-H1 is 1F1B with the weights' halves as many micro-batches late as the stage's number") {
  auto const plan = make_schedule(zero_bubble, {.stages = 3, .micro_batches = 4});
  CHECK(computations(plan, 0) == "F0 F1 F2 I0 W0 F3 I1 W1 I2 W2 I3 W3");
  CHECK(computations(plan, 1) == "F0 F1 I0 F2 I1 W0 F3 I2 W1 I3 W2 W3");
  CHECK(computations(plan, 2) == "F0 I0 F1 I1 F2 I2 W0 F3 I3 W1 W2 W3");
}

TEST_CASE("messages stand beside the computations that need and make them") {
  auto const plan = make_schedule(zero_bubble, {.stages = 3, .micro_batches = 1});
  CHECK(everything(plan, 0) == "forward of micro-batch 0 in chunk 0\n"
                               "send_activation of micro-batch 0 in chunk 0\n"
                               "receive_gradient of micro-batch 0 in chunk 0\n"
                               "backward_input of micro-batch 0 in chunk 0\n"
                               "backward_weights of micro-batch 0 in chunk 0\n");
  CHECK(everything(plan, 1) == "receive_activation of micro-batch 0 in chunk 0\n"
                               "forward of micro-batch 0 in chunk 0\n"
                               "send_activation of micro-batch 0 in chunk 0\n"
                               "receive_gradient of micro-batch 0 in chunk 0\n"
                               "backward_input of micro-batch 0 in chunk 0\n"
                               "send_gradient of micro-batch 0 in chunk 0\n"
                               "backward_weights of micro-batch 0 in chunk 0\n");
}

TEST_CASE("a message of the last stage's first chunk goes to the first stage's second") {
  auto const plan = make_schedule(interleaved, {.stages = 4, .micro_batches = 4, .chunks = 3});
  auto const next = plan.peer_of(3, {action_kind::send_activation, 0, 1});
  CHECK(next.stage == 0);
  CHECK(next.chunk == 2);
  auto const before = plan.peer_of(0, {action_kind::receive_activation, 0, 2});
  CHECK(before.stage == 3);
  CHECK(before.chunk == 1);
  CHECK(plan.peer_of(0, {action_kind::send_gradient, 0, 2}).stage == 3);
  CHECK(plan.peer_of(2, {action_kind::receive_gradient, 0, 2}).stage == 3);
  CHECK(!plan.has_before(0, 0));
  CHECK(!plan.has_after(3, 2));
  CHECK(plan.has_after(3, 1));
}

TEST_CASE("a single stage has no messages") {
  for (auto kind : {gpipe, one_f_one_b, interleaved, zero_bubble}) {
    auto const plan = make_schedule(kind, {.micro_batches = 3, .chunks = kind == interleaved ? 2 : 1});
    for (auto a : plan.actions[0]) CHECK(computes(a.kind));
  }
  CHECK(computations(make_schedule(one_f_one_b, {.micro_batches = 2}), 0) == "F0 B0 F1 B1");
  CHECK(computations(make_schedule(interleaved, {.micro_batches = 2, .chunks = 2}), 0) ==
        "F0.0 F0.1 B0.1 F1.0 B0.0 F1.1 B1.1 B1.0");
}

TEST_CASE("impossible shapes are refused with what to do") {
  for (auto shape : {schedule_shape{0, 1, 1}, schedule_shape{1, 0, 1}, schedule_shape{1, 1, 0}}) {
    auto const caught = test::error_of<config_error>([&] { make_schedule(gpipe, shape); });
    CHECK(caught.id == "E-layout-040");
    CHECK(caught.says("each needs 1 or more"));
  }
  for (auto kind : {gpipe, one_f_one_b, zero_bubble}) {
    auto const caught = test::error_of<config_error>([&] { make_schedule(kind, {2, 2, 2}); });
    CHECK(caught.id == "E-layout-041");
    CHECK(caught.says("only interleaved_one_forward_one_backward has more than 1"));
  }
  auto const caught = test::error_of<config_error>([] { make_schedule(interleaved, {2, 2, 1}); });
  CHECK(caught.id == "E-layout-041");
  CHECK(caught.says("needs 2 or more, or take one_forward_one_backward"));
}
