#include <tessera/parallel/memory_plan.hpp>

#include "fixture.hpp"

using namespace tessera;
using namespace fixture;

TEST_CASE(
    "Stage 1 divides the optimizer state: over all ranks it is there once, at stage 0 on each of them") {
  auto const units = hostile_units();
  auto const n = units.back().end;
  for (int ranks : {1, 2, 3, 4, 200})
    for (int zero : {0, 1}) {
      index_t state = 0;
      for (int r = 0; r < ranks; ++r) {
        auto const plan = parallel::plan_memory(units, {.rank = r,
                                                        .ranks = ranks,
                                                        .zero = zero,
                                                        .weight_bytes = 2,
                                                        .gradient_bytes = 4,
                                                        .state_bytes = 12});
        CHECK(plan.parameters == 2 * n);
        CHECK(plan.gradients == 4 * n);
        CHECK(plan.of(memory_kind::optimizer_state) == plan.optimizer_state);
        CHECK(plan.total() == plan.parameters + plan.gradients + plan.optimizer_state);
        state += plan.optimizer_state;
      }
      CHECK(state == 12 * n * (zero == 0 ? ranks : 1));
    }
}

TEST_CASE(
    "The formula is (2 + g + 12 / N) bytes a parameter, and the plan is within a granule a unit of it") {
  auto const units = units_of({100000, 70000, 70000, 31});
  auto const n = units.back().end;
  for (int ranks : {1, 2, 3, 4, 7}) {
    parallel::memory_plan_options o{
        .ranks = ranks, .zero = 1, .weight_bytes = 2, .gradient_bytes = 4, .state_bytes = 12};
    auto const formula = parallel::zero_formula_bytes(n, o);
    CHECK(formula == doctest::Approx(static_cast<double>(n) * (2 + 4 + 12.0 / ranks)));
    for (o.rank = 0; o.rank < ranks; ++o.rank) {
      auto const planned = static_cast<double>(parallel::plan_memory(units, o).total());
      CHECK(std::fabs(planned - formula) <= 4 * 12 * layout::parameter_map::alignment);
    }
  }
}
