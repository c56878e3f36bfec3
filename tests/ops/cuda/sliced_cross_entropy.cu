#include <tessera/ops/cuda/sliced_cross_entropy.cuh>

#include "ops/cuda/fixture.hpp"
#include "ops/sliced_fixture.hpp"
#include "support/cuda.hpp"

using namespace cuda_fixture;
using sliced_fixture::exact;
using sliced_fixture::some_targets;
using test::on_device;
using test::placement;

TEST_CASE_TEMPLATE("a cut vocabulary has float64's losses and gradients on CUDA, wherever logits lie", T,
                   float, bf16, fp16) {
  exec::cuda ex;
  for (auto [rows, classes] : {fixture::shape{0, 5}, {1, 1}, {4, 2}, {5, 129}, {2, 4133}})
    for (auto const& where : {placement{}, {.offset = 1, .gap = 3}, {.gap = 8}})
      for (auto const& cuts : sliced_fixture::cuts_of(classes)) {
        CAPTURE(rows);
        CAPTURE(classes);
        CAPTURE(cuts.size());
        ops::sliced_cross_entropy_options<exec::cuda_memory> options{.classes = classes,
                                                                     .label_smoothing =
                                                                         where.gap == 3 ? 0.2f : 0.0f,
                                                                     .z_loss = where.gap == 8 ? 1e-2f : 0.0f,
                                                                     .gradient_scale = 0.5f,
                                                                     .write_gradient = true};
        auto const x = reference::normal<T, 2>({rows, classes}, 1, 3.0f);
        auto const targets = some_targets(rows, classes);
        exact const expected(reference::doubles(x.span()), rows, classes, targets.span(), options);

        on_device<T, 2> logits(ex, x, where);
        on_device<std::int32_t, 1> device_targets(ex, targets);
        auto const ranks = static_cast<index_t>(cuts.size()) - 1;
        tensor<float, 3, exec::cuda_memory> parts({ranks, rows, 4});
        on_device<float, 2> merged(ex, {rows, 4});
        on_device<float, 1> losses(ex, {rows});
        auto const slice = [&](std::size_t rank) {
          return logits.view().slice(1, cuts[rank], cuts[rank + 1]);
        };
        for (std::size_t rank = 0; rank + 1 < cuts.size(); ++rank)
          ops::softmax_statistics(ex, parts.view()[static_cast<index_t>(rank)], slice(rank), device_targets,
                                  {.first_class = cuts[rank], .classes = classes});
        ops::merge_softmax_statistics(ex, merged.view(), parts);
        for (std::size_t rank = 0; rank + 1 < cuts.size(); ++rank) {
          options.first_class = cuts[rank];
          auto const total =
              ops::cross_entropy_of(ex, slice(rank), losses.view(), device_targets, merged, options);
          CHECK(total.sum == doctest::Approx(expected.sum).epsilon(1e-5));
          CHECK(total.count == expected.count);
        }
        if (classes == 1) continue;
        CHECK(reference::max_relative_error(losses.read(ex), expected.losses) < 1e-5);
        CHECK(reference::max_relative_error(logits.read(ex), expected.gradient) < reference::tolerance<T>());
      }
}

TEST_CASE("totals are added to on the device, and logits stay where no gradient is asked for") {
  exec::cuda ex;
  auto const x = reference::normal<float, 2>({5, 9}, 1);
  auto const targets = some_targets(5, 9);
  exact const expected(reference::doubles(x.span()), 5, 9, targets.span(),
                       ops::sliced_cross_entropy_options<>{});
  tensor<double, 1> before({2});
  before(0) = 10, before(1) = 1;
  on_device<float, 2> logits(ex, x), statistics(ex, {5, 4});
  on_device<float, 1> losses(ex, {5});
  on_device<double, 1> totals(ex, before);
  on_device<std::int32_t, 1> device_targets(ex, targets);
  ops::softmax_statistics(ex, statistics.view(), logits.view(), device_targets);
  ops::cross_entropy_of(ex, logits.view(), losses.view(), device_targets, statistics,
                        {.totals = totals.view()});
  CHECK(bits(logits.read(ex)) == bits(x));
  auto const after = totals.read(ex);
  CHECK(after(0) == doctest::Approx(10 + expected.sum));
  CHECK(after(1) == 1 + expected.count);
}

TEST_CASE(
    "a target outside the vocabulary is named by the next call that waits; one of another slice is not") {
  exec::cuda ex;
  tensor<std::int32_t, 1> targets({3});
  targets(0) = 7, targets(1) = 0, targets(2) = 9;
  on_device<std::int32_t, 1> device_targets(ex, targets);
  on_device<float, 2> logits(ex, reference::normal<float, 2>({3, 4}, 1)), statistics(ex, {3, 4});
  on_device<float, 1> losses(ex, {3});
  on_device<double, 1> totals(ex, {2});
  ops::softmax_statistics(ex, statistics.view(), logits.view(), device_targets,
                          {.first_class = 2, .classes = 10});
  ex.synchronize();
  ops::softmax_statistics(ex, statistics.view(), logits.view(), device_targets,
                          {.first_class = 2, .classes = 9});
  auto caught = test::error_of<size_error>([&] { ex.synchronize(); });
  CHECK(caught.id == "E-ops-004");
  CHECK(caught.says("row 2 is 9"));
  ops::cross_entropy_of(ex, logits.view(), losses.view(), device_targets, statistics,
                        {.first_class = 2, .classes = 9, .write_gradient = true, .totals = totals.view()});
  caught = test::error_of<size_error>([&] { ex.synchronize(); });
  CHECK(caught.id == "E-ops-004");
  CHECK(std::isnan(losses.read(ex)(2)));
  CHECK(std::isnan(logits.read(ex)(2, 0)));
}
