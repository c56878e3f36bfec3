#include <tessera/optim/schedule.hpp>

#include "fixture.hpp"

using namespace tessera;
using namespace fixture;
using optim::schedule;
using optim::schedule_form;

namespace {

void check_table(schedule const& rate, std::vector<std::pair<index_t, double>> const& table) {
  for (auto const& row : table) {
    CAPTURE(row.first);
    CHECK(rate(row.first) == doctest::Approx(row.second).epsilon(1e-12));
  }
}

} // namespace

TEST_CASE("A warm-up rises from peak / steps to the peak, for every form") {
  for (auto form : {schedule_form::constant, schedule_form::linear, schedule_form::cosine,
                    schedule_form::warm_up_stable_decay})
    check_table(schedule({.form = form, .peak = 8, .steps = 20, .warm_up = {4}}),
                {{0, 2}, {1, 4}, {2, 6}, {3, 8}, {4, 8}});
}

TEST_CASE("Constant stays at the peak for ever") {
  check_table(schedule({.form = schedule_form::constant, .peak = 3}), {{0, 3}, {1, 3}, {1000000, 3}});
}

TEST_CASE("Linear falls along a line from the end of the warm-up to the final rate") {
  check_table(
      schedule(
          {.form = schedule_form::linear, .peak = 10, .final_fraction = 0.2, .steps = 12, .warm_up = {2}}),
      {{2, 10}, {3, 9.2}, {7, 6}, {11, 2.8}, {12, 2}, {500, 2}});
}

TEST_CASE("Cosine falls along half a period") {
  auto const root_half = 0.70710678118654752440;
  check_table(
      schedule(
          {.form = schedule_form::cosine, .peak = 1, .final_fraction = 0.1, .steps = 10, .warm_up = {2}}),
      {{2, 1},
       {4, 0.1 + 0.9 * (0.5 + 0.5 * root_half)},
       {6, 0.55},
       {8, 0.1 + 0.9 * (0.5 - 0.5 * root_half)},
       {10, 0.1},
       {11, 0.1}});
}

TEST_CASE("Warm-up, stable, decay: the peak until the last steps, then one minus a square root") {
  check_table(schedule({.form = schedule_form::warm_up_stable_decay,
                        .peak = 2,
                        .final_fraction = 0,
                        .steps = 30,
                        .warm_up = {10},
                        .decay = 16}),
              {{0, 0.2}, {9, 2}, {13, 2}, {14, 2}, {15, 1.5}, {18, 1}, {23, 0.5}, {30, 0}, {31, 0}});
}

TEST_CASE("A schedule may be all warm-up, or have no steps at all") {
  check_table(
      schedule({.form = schedule_form::linear, .peak = 4, .final_fraction = 0.5, .steps = 4, .warm_up = {4}}),
      {{0, 1}, {3, 4}, {4, 2}});
  check_table(schedule({.form = schedule_form::cosine, .peak = 4, .final_fraction = 0.5}), {{0, 2}, {9, 2}});
  CHECK(schedule()(7) == 0);
}

TEST_CASE("Names of forms are read back, and unknown ones are refused") {
  CHECK(optim::schedule_form_named("cosine") == schedule_form::cosine);
  CHECK(optim::schedule_form_named("warm_up_stable_decay") == schedule_form::warm_up_stable_decay);
  CHECK(id_thrown_by<config_error>([] { optim::schedule_form_named("cosin"); }) == "E-optim-005");
}

TEST_CASE("Impossible schedules are refused") {
  auto const refused = [](optim::schedule_options o) {
    return id_thrown_by<config_error>([&] { schedule{o}; }) == "E-optim-006";
  };
  CHECK(refused({.form = schedule_form::linear, .peak = 1, .steps = 5, .warm_up = {6}}));
  CHECK(refused(
      {.form = schedule_form::warm_up_stable_decay, .peak = 1, .steps = 5, .warm_up = {3}, .decay = 3}));
  CHECK(refused({.form = schedule_form::constant, .peak = -1}));
  CHECK(refused({.form = schedule_form::constant, .peak = NAN}));
  CHECK(refused({.form = schedule_form::cosine, .peak = 1, .final_fraction = -0.1, .steps = 5}));
  CHECK(refused({.form = schedule_form::cosine, .peak = 1, .steps = -5}));
  CHECK_FALSE(refused({.form = schedule_form::constant, .peak = 1, .warm_up = {10}}));
}
