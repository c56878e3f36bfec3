#include <tessera/ops/cuda/cross_entropy.cuh>

#include "ops/cuda/fixture.hpp"
#include "support/cuda.hpp"
#if defined(TESSERA_CUDA_EMULATION)
#include <cuda_emulation/control.hpp>
#endif

using namespace cuda_fixture;
using test::on_device;

namespace {

using options_of = ops::cross_entropy_options<exec::cuda_memory>;

double exact_loss(numbers const& x, std::int32_t target, options_of const& options) {
  if (target == ops::ignore_index) return 0;
  double largest = -INFINITY, sum = 0, mean = 0;
  for (auto v : x) largest = std::fmax(largest, v);
  for (auto v : x) sum += std::exp(v - largest);
  for (auto v : x) mean += v / static_cast<double>(x.size());
  auto const log_sum = largest + std::log(sum);
  auto const s = static_cast<double>(options.label_smoothing);
  return log_sum - (1 - s) * x[static_cast<std::size_t>(target)] - s * mean +
         static_cast<double>(options.z_loss) * log_sum * log_sum;
}
numbers exact_gradient(numbers const& x, std::int32_t target, options_of const& options) {
  numbers out(x.size());
  if (target == ops::ignore_index) return out;
  double largest = -INFINITY, sum = 0;
  for (auto v : x) largest = std::fmax(largest, v);
  for (auto v : x) sum += std::exp(v - largest);
  auto const z = static_cast<double>(options.z_loss), s = static_cast<double>(options.label_smoothing);
  auto const stretch = 1 + 2 * z * (largest + std::log(sum));
  for (std::size_t i = 0; i < x.size(); ++i)
    out[i] = static_cast<double>(options.gradient_scale) *
             (std::exp(x[i] - largest) / sum * stretch -
              (static_cast<std::int32_t>(i) == target ? 1 - s : 0) - s / static_cast<double>(x.size()));
  return out;
}

/// Targets in [0, classes), every third ignored.
tensor<std::int32_t, 1> some_targets(index_t rows, index_t classes) {
  auto targets = reference::integers(rows, static_cast<std::int32_t>(classes), 7);
  for (index_t r = 2; r < rows; r += 3) targets(r) = ops::ignore_index;
  return targets;
}

} // namespace

TEST_CASE_TEMPLATE("losses and gradients on CUDA agree with double and the host", T, float, bf16, fp16) {
  exec::cuda ex;
  exec::host host({.threads = 1});
  struct shape {
    index_t rows, classes;
  };
  for (auto const size : {shape{0, 5}, {1, 1}, {4, 2}, {7, 129}, {5, 17}, {2, 1024}, {2, 5003}})
    for (test::placement where : {test::placement{}, {.offset = 1, .gap = 3}, {.offset = 3, .gap = 1}})
      for (auto const& options : {options_of{},
                                  {.label_smoothing = 0.1f, .gradient_scale = 3.0f},
                                  {.label_smoothing = 0.2f, .z_loss = 1e-2f, .gradient_scale = 0.5f}}) {
        auto const rows = size.rows, classes = size.classes;
        if (classes > 2000 && where.gap == 3) continue;
        CAPTURE(rows);
        CAPTURE(classes);
        CAPTURE(where.offset);
        auto const x = reference::normal<T, 2>({rows, classes}, 1, 3.0f);
        auto const targets = some_targets(rows, classes);
        on_device<T, 2> logits(ex, x, where);
        on_device<std::int32_t, 1> device_targets(ex, targets);
        on_device<float, 1> losses(ex, {rows}), again(ex, {rows});
        auto const total = ops::cross_entropy(ex, logits.view(), losses.view(), device_targets, options);
        CHECK(bits(logits.read(ex)) == bits(x)); // untouched unless the gradient is asked for
        auto with_gradient = options;
        with_gradient.write_gradient = true;
        auto const same = ops::cross_entropy(ex, logits.view(), again.view(), device_targets, with_gradient);

        auto host_logits = reference::normal<T, 2>({rows, classes}, 1, 3.0f);
        tensor<float, 1> host_losses({rows});
        auto const host_total = ops::cross_entropy(host, host_logits.view(), host_losses.view(), targets,
                                                   {.label_smoothing = options.label_smoothing,
                                                    .z_loss = options.z_loss,
                                                    .gradient_scale = options.gradient_scale,
                                                    .write_gradient = true});
        auto const xs = reference::doubles(x.span());
        numbers expected, slopes;
        double sum = 0, count = 0;
        for (index_t r = 0; r < rows; ++r) {
          auto const row = part(xs, r, classes);
          expected.push_back(exact_loss(row, targets(r), options));
          auto const slope = exact_gradient(row, targets(r), options);
          slopes.insert(slopes.end(), slope.begin(), slope.end());
          sum += expected.back();
          count += targets(r) != ops::ignore_index;
        }
        CHECK(total.sum == doctest::Approx(sum).epsilon(1e-6));
        CHECK(total.sum == doctest::Approx(host_total.sum).epsilon(1e-6));
        CHECK(total.count == count);
        CHECK(same.sum == total.sum);
        auto const got = losses.read(ex);
        CHECK(bits(again.read(ex)) == bits(got));
        auto const gradient = logits.read(ex);
        if (classes == 1) continue; // loss and gradient are zero
        CHECK(reference::max_relative_error(got, expected) < 1e-5);
        CHECK(agree(gradient, slopes, host_logits));
      }
}

TEST_CASE("totals are added to on the device and nothing is returned") {
  exec::cuda ex;
  auto const x = reference::normal<float, 2>({7, 40}, 1);
  on_device<std::int32_t, 1> targets(ex, some_targets(7, 40));
  on_device<float, 2> logits(ex, x);
  on_device<float, 1> losses(ex, {7});
  tensor<double, 1> start({2});
  start(0) = 10;
  start(1) = 20;
  on_device<double, 1> totals(ex, start);
  auto const expected = ops::cross_entropy(ex, logits.view(), losses.view(), targets);
  auto const returned = ops::cross_entropy(ex, logits.view(), losses.view(), targets, {.totals = totals});
  CHECK(returned.sum == 0);
  CHECK(returned.count == 0);
  auto const got = totals.read(ex);
  CHECK(got(0) == 10 + expected.sum);
  CHECK(got(1) == 20 + expected.count);
}

TEST_CASE("large logits do not overflow on CUDA, masked ones do no harm, NaN is not hidden") {
  exec::cuda ex;
  index_t const classes = 5000;
  tensor<std::int32_t, 1> targets({1});
  targets(0) = 4999;
  on_device<std::int32_t, 1> device_targets(ex, targets);
  on_device<float, 1> losses(ex, {1});
  auto const loss_of = [&](auto logit, bool gradient = false) {
    tensor<float, 2> x({1, classes});
    for (index_t i = 0; i < classes; ++i) x(0, i) = logit(i);
    on_device<float, 2> logits(ex, x);
    auto const sum =
        ops::cross_entropy(ex, logits.view(), losses.view(), device_targets, {.write_gradient = gradient})
            .sum;
    if (gradient) CHECK(logits.read(ex)(0, 0) == 0);
    return sum;
  };
  CHECK(loss_of([](index_t) { return 100.0f; }) == doctest::Approx(std::log(5000.0)));
  CHECK(std::isfinite(loss_of([](index_t) { return 3e38f; })));
  CHECK(std::isfinite(loss_of([](index_t) { return -1e30f; })));
  CHECK(loss_of([](index_t i) { return i < 4998 ? -INFINITY : 1.0f; }, true) ==
        doctest::Approx(std::log(2.0)));
  CHECK(std::isnan(loss_of([](index_t i) { return i == 2500 ? NAN : 0.0f; })));
  CHECK(std::isnan(loss_of([](index_t) { return -INFINITY; })));
  CHECK(std::isnan(loss_of([](index_t i) { return i == 17 ? INFINITY : 0.0f; })));
}

TEST_CASE("a target that is no class is named by the call that waits, the lowest row of several") {
  exec::cuda ex;
  for (auto bad : {-1, 6, -99, INT32_MAX, INT32_MIN}) {
    tensor<std::int32_t, 1> targets({4});
    targets(1) = targets(3) = bad;
    on_device<std::int32_t, 1> device_targets(ex, targets);
    on_device<float, 2> logits(ex, reference::normal<float, 2>({4, 6}, 1));
    on_device<float, 1> losses(ex, {4});
    on_device<double, 1> totals(ex, {2});
    auto caught = test::error_of<size_error>([&] {
      (void)ops::cross_entropy(ex, logits.view(), losses.view(), device_targets, {.write_gradient = true});
    });
    CHECK(caught.id == "E-ops-004");
    CHECK(caught.says("row 1 is " + std::to_string(bad)));
    CHECK(caught.says("[0, 6)"));
    auto const gradient = logits.read(ex); // said once
    CHECK(std::isnan(gradient(1, 0)));
    CHECK(!std::isnan(gradient(2, 0)));

    // With totals nobody waits yet.
    CHECK_NOTHROW(
        (void)ops::cross_entropy(ex, logits.view(), losses.view(), device_targets, {.totals = totals}));
    caught = test::error_of<size_error>([&] { (void)totals.read(ex); });
    CHECK(caught.id == "E-ops-004");
    CHECK(std::isnan(totals.read(ex)(0)));
  }
}

TEST_CASE("rows that are all ignored count nothing and get zero gradients on CUDA") {
  exec::cuda ex;
  tensor<std::int32_t, 1> targets({5});
  for (auto& t : targets.span()) t = ops::ignore_index;
  on_device<std::int32_t, 1> device_targets(ex, targets);
  on_device<bf16, 2> logits(ex, reference::normal<bf16, 2>({5, 33}, 1), {.gap = 1});
  on_device<float, 1> losses(ex, {5});
  auto const total = ops::cross_entropy(ex, logits.view(), losses.view(), device_targets,
                                        {.label_smoothing = 0.1f, .write_gradient = true});
  CHECK(total.sum == 0);
  CHECK(total.count == 0);
  auto const zeros = logits.read(ex);
  for (auto v : zeros.span()) CHECK(v.bits == 0);
}

#if defined(TESSERA_CUDA_EMULATION)
TEST_CASE("losses, gradients and the fault that is named do not depend on the order of blocks") {
  exec::cuda ex;
  auto targets = some_targets(9, 300);
  targets(4) = targets(7) = 300;
  on_device<std::int32_t, 1> device_targets(ex, targets);
  on_device<float, 1> losses(ex, {9});
  std::string before;
  for (bool backwards : {false, true}) {
    cuda_emulation::run_blocks_backwards(backwards);
    on_device<bf16, 2> logits(ex, reference::normal<bf16, 2>({9, 300}, 1), {.gap = 3});
    auto const caught = test::error_of<size_error>([&] {
      (void)ops::cross_entropy(ex, logits.view(), losses.view(), device_targets, {.write_gradient = true});
    });
    CHECK(caught.says("row 4 is 300"));
    auto const all = bits(losses.read(ex)) + bits(logits.read(ex));
    if (backwards) CHECK(all == before);
    before = all;
  }
  cuda_emulation::run_blocks_backwards(false);
}
#endif
