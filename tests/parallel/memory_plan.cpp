#include <tessera/parallel/memory_plan.hpp>

#include "fixture.hpp"

using namespace tessera;
using namespace fixture;

TEST_CASE("What a stage shares is there once over all ranks, the rest on each of them") {
  auto const units = hostile_units();
  auto const n = units.back().end;
  for (int ranks : {1, 2, 3, 4, 200})
    for (int zero : {0, 1, 2, 3}) {
      parallel::memory_plan sum;
      for (int r = 0; r < ranks; ++r) {
        auto const plan = parallel::plan_memory(units, {.rank = r,
                                                        .ranks = ranks,
                                                        .zero = zero,
                                                        .weight_bytes = 2,
                                                        .gradient_bytes = 4,
                                                        .state_bytes = 12});
        CHECK(plan.of(memory_kind::optimizer_state) == plan.optimizer_state);
        CHECK(plan.total() == plan.parameters + plan.gradients + plan.optimizer_state);
        sum.parameters += plan.parameters;
        sum.gradients += plan.gradients;
        sum.optimizer_state += plan.optimizer_state;
      }
      CHECK(sum.parameters == 2 * n * (zero < 3 ? ranks : 1));
      CHECK(sum.gradients == 4 * n * (zero < 2 ? ranks : 1));
      CHECK(sum.optimizer_state == 12 * n * (zero < 1 ? ranks : 1));
    }
}

TEST_CASE("The formulas are the paper's, and a plan is within a granule a unit of them") {
  auto const units = units_of({100000, 70000, 70000, 31});
  auto const n = units.back().end;
  auto const psi = static_cast<double>(n);
  for (int ranks : {1, 2, 3, 4, 7}) {
    double const expected[] = {16 * psi, (4 + 12.0 / ranks) * psi, (2 + 14.0 / ranks) * psi,
                               16 * psi / ranks};
    for (int zero : {0, 1, 2, 3}) {
      parallel::memory_plan_options o{
          .ranks = ranks, .zero = zero, .weight_bytes = 2, .gradient_bytes = 2, .state_bytes = 12};
      auto const formula = parallel::zero_formula_bytes(n, o);
      CHECK(formula == doctest::Approx(expected[zero]));
      for (o.rank = 0; o.rank < ranks; ++o.rank) {
        auto const planned = static_cast<double>(parallel::plan_memory(units, o).total());
        CHECK(std::fabs(planned - formula) <= 4 * 16 * layout::parameter_map::alignment);
      }
    }
  }
}
