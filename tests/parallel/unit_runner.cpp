#include <tessera/parallel/unit_runner.hpp>

#include <doctest/doctest.h>
#include <parallel/pipeline_fixture.hpp>
#include <support/thrown.hpp>

using namespace tessera;
using namespace fixture;
using nn::backward_part;

namespace {

/// Runs the micro-batches of a step in `slots` slots, all forwards of a group before its backwards.
gradients_by_unit gradients_of(nn::transformer_config const& config, one_rank_step& expected, int slots,
                               bool halves, nn::loss_sum& loss) {
  host ex({.threads = 1});
  auto units = nn::make_transformer<host, float, float>(config);
  auto const count = std::ssize(units);
  parallel::unit_runner<host, float, float> runner(units, {{0, 3}, {3, count}},
                                                   {.width = config.width,
                                                    .largest = largest_micro_batch,
                                                    .slots = 2 * slots,
                                                    .halves = halves,
                                                    .ends_model = true});
  stage_lender lender(units, expected.model.store());
  auto const m = expected.batches.count();
  tensor<double, 1> totals({2});
  for (index_t begin = 0; begin < m; begin += slots) {
    auto const end = (std::min)(begin + slots, m);
    auto const slot_of = [&](index_t i, std::size_t part) {
      return narrow<int>(2 * (i - begin)) + (part > 0 ? 1 : 0);
    };
    for (auto i = begin; i < end; ++i)
      for (std::size_t part : {0u, 1u}) {
        runner.start(slot_of(i, part), {part, i},
                     {.tokens = expected.batches.tokens(i),
                      .targets = expected.batches.targets(i),
                      .totals = totals.view()},
                     {.seed = 3, .step = 2, .first_sample = expected.batches.part(i).begin});
        auto const input = part == 0 ? view<float, 2>{} : runner.output(slot_of(i, 0));
        auto const next = part == 0 ? runner.first_of_forward(1) : parallel::no_unit;
        runner.forward(ex, lender, slot_of(i, part), input, next);
      }
    for (auto i = begin; i < end; ++i) {
      auto const rows = runner.rows_of({expected.batches.part(i).size(), 11});
      std::vector<float> room(static_cast<std::size_t>(rows * config.width), 7.0f);
      view<float, 2> const gradient{room.data(), {rows, config.width}};
      auto const last = i + 1 == m;
      for (std::size_t part : {1u, 0u}) {
        auto const first = halves ? backward_part::input : backward_part::both;
        runner.backward(ex, lender, slot_of(i, part), gradient, first, last);
        if (halves) runner.backward(ex, lender, slot_of(i, part), {}, backward_part::weights, last);
        runner.finish(slot_of(i, part));
      }
    }
  }
  CHECK(lender.complete(narrow<int>(m)));
  loss = {totals.data()[0], totals.data()[1]};
  gradients_by_unit all;
  lender.add_to(all);
  return all;
}

} // namespace

TEST_CASE(
    "one, several or all micro-batches in flight give the gradients of one after another, in halves too") {
  for (auto const& config : {pipeline_gpt2(), pipeline_llama()}) {
    one_rank_step expected(config, 4);
    for (int slots : {1, 2, 4})
      for (bool halves : {false, true}) {
        CAPTURE(slots);
        CAPTURE(halves);
        nn::loss_sum loss;
        auto const got = gradients_of(config, expected, slots, halves, loss);
        CHECK(loss.sum == expected.loss.sum);
        CHECK(loss.count == expected.loss.count);
        CHECK(fixture::distance(got, expected.gradients) == 0);
      }
  }
}

TEST_CASE("slots share their scratch: each further one costs what units keep") {
  auto const config = pipeline_gpt2();
  auto units = nn::make_transformer<host, float, float>(config);
  index_t kept = 0, scratch = 0;
  for (std::size_t u = 0; u + 1 < units.size(); ++u) {
    kept += units[u]->kept_bytes(largest_micro_batch);
    scratch = (std::max)(scratch, units[u]->scratch_bytes(largest_micro_batch));
  }
  memory_meter meter;
  parallel::unit_runner<host, float, float> runner(units, {{0, std::ssize(units)}},
                                                   {.width = config.width,
                                                    .largest = largest_micro_batch,
                                                    .slots = 3,
                                                    .ends_model = true,
                                                    .meter = &meter});
  auto const plan = runner.plan(largest_micro_batch);
  CHECK(plan.slot == kept);
  CHECK(plan.scratch >= scratch);
  CHECK(meter.current(memory_kind::activations) == 3 * kept + plan.scratch);
}

TEST_CASE("parts that are not a partition of the units, and micro-batches larger than planned, are refused") {
  auto const config = pipeline_llama();
  auto units = nn::make_transformer<host, float, float>(config);
  auto const n = std::ssize(units);
  using ranges = std::vector<layout::range>;
  for (auto const& parts :
       {ranges{}, ranges{{0, n - 1}}, ranges{{1, n}}, ranges{{0, 3}, {4, n}}, ranges{{0, 0}, {0, n}},
        ranges{{0, n}, {n, n}}, ranges{{0, n + 1}}, ranges{{3, n}, {0, 3}}}) {
    auto const caught = test::error_of<config_error>([&] {
      parallel::unit_runner<host, float, float> runner(units, parts, {.width = 24, .largest = {1, 4}});
    });
    CHECK(caught.id == "E-parallel-080");
  }
  CHECK(test::error_of<config_error>([&] {
          parallel::unit_runner<host, float, float> runner(units, {{0, n}},
                                                           {.width = 24, .largest = {1, 4}, .slots = 0});
        }).id == "E-parallel-080");

  parallel::unit_runner<host, float, float> runner(units, {{0, n}},
                                                   {.width = 24, .largest = {1, 4}, .ends_model = true});
  std::vector<std::int32_t> tokens(8);
  view<std::int32_t const, 2> const two{tokens.data(), {2, 4}};
  auto const caught =
      test::error_of<size_error>([&] { runner.start(0, {}, {.tokens = two, .targets = two}, {}); });
  CHECK(caught.id == "E-parallel-081");
  CHECK(caught.says("2 samples of 4 tokens"));
}
