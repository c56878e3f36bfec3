#include <tessera/ops/cross_entropy.hpp>

#include "fixture.hpp"

using namespace fixture;

namespace {

double exact_loss(numbers const& x, std::int32_t target, ops::cross_entropy_options<> const& options) {
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

/// Targets in [0, classes), every third ignored.
tensor<std::int32_t, 1> some_targets(index_t rows, index_t classes) {
  auto targets = reference::integers(rows, static_cast<std::int32_t>(classes), 7);
  for (index_t r = 2; r < rows; r += 3) targets(r) = ops::ignore_index;
  return targets;
}

} // namespace

TEST_CASE_TEMPLATE("losses and gradients agree with double, with and without smoothing and z-loss", T, float,
                   bf16, fp16) {
  exec::host ex({.threads = 2});
  for (auto const size : {shape{0, 5}, {1, 1}, {4, 2}, {7, 129}, {67, 17}, {2, 2048}, {2, 2053}})
    for (auto const& options : {ops::cross_entropy_options<>{},
                                {.label_smoothing = 0.1f, .gradient_scale = 3.0f},
                                {.label_smoothing = 1.0f},
                                {.label_smoothing = 0.2f, .z_loss = 1e-2f, .gradient_scale = 0.5f}}) {
      auto const rows = size.rows, classes = size.width;
      CAPTURE(rows);
      CAPTURE(classes);
      auto const x = reference::normal<T, 2>({rows, classes}, 1, 3.0f);
      auto const targets = some_targets(rows, classes);
      apart<T> logits(x), gradient(x);
      tensor<float, 1> losses({rows}), again({rows});
      auto with_gradient = options;
      with_gradient.write_gradient = true;
      auto const total = ops::cross_entropy(ex, logits.rows, losses.view(), targets, options);
      auto const same = ops::cross_entropy(ex, gradient.rows, again.view(), targets, with_gradient);

      auto const w = static_cast<std::size_t>(classes);
      auto const xs = reference::doubles(x.span());
      numbers expected;
      double sum = 0, count = 0;
      for (index_t r = 0; r < rows; ++r) {
        auto const begin = xs.begin() + r * classes;
        expected.push_back(exact_loss(numbers(begin, begin + classes), targets(r), options));
        sum += expected.back();
        count += targets(r) != ops::ignore_index;
      }
      CHECK(total.sum == doctest::Approx(sum).epsilon(1e-6));
      CHECK(total.count == count);
      CHECK(same.sum == total.sum);
      CHECK(bits(again) == bits(losses));
      CHECK(bits(logits.packed()) == bits(x)); // untouched unless the gradient is asked for
      if (classes > 1) CHECK(reference::max_relative_error(losses, expected) < 1e-5);
      if (rows * classes > 1200 || classes == 1) continue;
      auto const slope = reference::gradient_by_rows(xs, w, [&](numbers const& row, std::size_t r) {
        return static_cast<double>(options.gradient_scale) *
               exact_loss(row, targets(static_cast<index_t>(r)), options);
      });
      CHECK(reference::max_relative_error(gradient.packed(), slope) < reference::tolerance<T>());
      CHECK(gradient.padding_is(77));
    }
}

TEST_CASE("a row of one class has no loss and no gradient") {
  exec::host ex({.threads = 1});
  tensor<float, 2> x({1, 1});
  x(0, 0) = 3;
  tensor<float, 1> losses({1});
  tensor<std::int32_t, 1> targets({1});
  CHECK(ops::cross_entropy(ex, x.view(), losses.view(), targets, {.write_gradient = true}).sum == 0);
  CHECK(x(0, 0) == 0);
}

TEST_CASE("a vocabulary of GPT-2's size agrees with double") {
  exec::host ex({.threads = 2});
  index_t const classes = 50257;
  auto x = reference::normal<float, 2>({2, classes}, 1, 2.0f);
  auto const xs = reference::doubles(x.span());
  tensor<float, 1> losses({2});
  tensor<std::int32_t, 1> targets({2});
  targets(0) = 50256;
  targets(1) = 0;
  auto const total = ops::cross_entropy(ex, x.view(), losses.view(), targets, {.write_gradient = true});
  double sum = 0, worst = 0;
  for (index_t r = 0; r < 2; ++r) {
    auto const begin = xs.begin() + r * classes;
    numbers const row(begin, begin + classes);
    sum += exact_loss(row, targets(r), {});
    double exponentials = 0;
    for (auto v : row) exponentials += std::exp(v);
    for (index_t i = 0; i < classes; ++i) {
      auto const p = std::exp(row[static_cast<std::size_t>(i)]) / exponentials;
      worst = std::fmax(worst, std::fabs(static_cast<double>(x(r, i)) - (p - (i == targets(r)))) / p);
    }
  }
  CHECK(total.sum == doctest::Approx(sum).epsilon(1e-7));
  CHECK(worst < 2e-2); // relative to each p: at the target, 1 - p in float keeps 6e-8 of 1
}

TEST_CASE("rows that are all ignored count nothing and get zero gradients") {
  exec::host ex({.threads = 2});
  auto x = reference::normal<bf16, 2>({5, 33}, 1);
  tensor<float, 1> losses({5});
  tensor<std::int32_t, 1> targets({5});
  for (auto& t : targets.span()) t = ops::ignore_index;
  auto const total = ops::cross_entropy(ex, x.view(), losses.view(), targets,
                                        {.label_smoothing = 0.1f, .write_gradient = true});
  CHECK(total.sum == 0);
  CHECK(total.count == 0);
  for (auto v : x.span()) CHECK(static_cast<float>(v) == 0);
}

TEST_CASE("splitting the rows splits sum and count: nothing is averaged") {
  exec::host ex({.threads = 2});
  auto const targets = some_targets(13, 40);
  auto whole = reference::normal<float, 2>({13, 40}, 1), parts = reference::normal<float, 2>({13, 40}, 1);
  tensor<float, 1> losses({13});
  ops::cross_entropy_options<> const options{.label_smoothing = 0.1f, .write_gradient = true};
  auto const total = ops::cross_entropy(ex, whole.view(), losses.view(), targets, options);
  double sum = 0, count = 0;
  for (index_t begin : {0, 5}) {
    auto const end = begin == 0 ? index_t{5} : index_t{13};
    auto const part =
        ops::cross_entropy(ex, parts.view().slice(0, begin, end), losses.view().slice(0, begin, end),
                           targets.view().slice(0, begin, end), options);
    sum += part.sum;
    count += part.count;
  }
  CHECK(sum == doctest::Approx(total.sum).epsilon(1e-14));
  CHECK(count == total.count);
  CHECK(bits(parts) == bits(whole));
}

TEST_CASE("where totals are given, sum and count are added to them and not returned") {
  exec::host ex({.threads = 1});
  auto const x = reference::normal<float, 2>({7, 40}, 1);
  auto copy = reference::normal<float, 2>({7, 40}, 1);
  auto const targets = some_targets(7, 40);
  tensor<float, 1> losses({7});
  tensor<double, 1> totals({2}), three({3});
  totals(0) = 10;
  totals(1) = 20;
  auto const expected = ops::cross_entropy(ex, copy.view(), losses.view(), targets);
  auto const returned = ops::cross_entropy(ex, copy.view(), losses.view(), targets, {.totals = totals});
  CHECK(returned.sum == 0);
  CHECK(returned.count == 0);
  CHECK(totals(0) == 10 + expected.sum);
  CHECK(totals(1) == 20 + expected.count);
  auto const wrong = [&] {
    (void)ops::cross_entropy(ex, copy.view(), losses.view(), targets, {.totals = three});
  };
  CHECK(test::error_of<size_error>(wrong).id == "E-ops-001");
}

TEST_CASE("large logits do not overflow, masked ones do no harm, NaN is not hidden") {
  exec::host ex({.threads = 1});
  index_t const classes = 5000;
  tensor<float, 1> losses({1});
  tensor<std::int32_t, 1> targets({1});
  auto const loss_of = [&](auto logit, bool gradient = false) {
    tensor<float, 2> x({1, classes});
    for (index_t i = 0; i < classes; ++i) x(0, i) = logit(i);
    targets(0) = 4999;
    auto const sum =
        ops::cross_entropy(ex, x.view(), losses.view(), targets, {.write_gradient = gradient}).sum;
    if (gradient) CHECK(x(0, 0) == 0);
    return sum;
  };
  auto const log_n = std::log(5000.0);
  CHECK(loss_of([](index_t) { return 3e38f; }) == doctest::Approx(0).epsilon(1));
  CHECK(loss_of([](index_t) { return -1e30f; }) == doctest::Approx(0).epsilon(1));
  CHECK(loss_of([](index_t) { return 100.0f; }) == doctest::Approx(log_n));
  // The first pieces of the row hold nothing but masked classes.
  CHECK(loss_of([](index_t i) { return i < 4998 ? -INFINITY : 1.0f; }, true) ==
        doctest::Approx(std::log(2.0)));
  CHECK(std::isnan(loss_of([](index_t i) { return i == 2500 ? NAN : 0.0f; })));
  CHECK(std::isnan(loss_of([](index_t) { return -INFINITY; })));
  CHECK(std::isnan(loss_of([](index_t i) { return i == 17 ? INFINITY : 0.0f; })));
}

TEST_CASE_TEMPLATE("cross_entropy gives the same bits for any number of threads", T, float, bf16) {
  auto const targets = some_targets(61, 2503);
  same_bits_for_any_thread_count([&](exec::host& ex) {
    auto x = reference::normal<T, 2>({61, 2503}, 1);
    tensor<float, 1> losses({61});
    tensor<double, 1> sum({1});
    sum(0) = ops::cross_entropy(ex, x.view(), losses.view(), targets, {.write_gradient = true}).sum;
    return bits(x) + bits(losses) + bits(sum);
  });
}

TEST_CASE("a target that is no class is named, and nothing is written") {
  exec::host ex({.threads = 2});
  for (auto bad : {-1, 6, -99, INT32_MAX, INT32_MIN}) {
    auto x = reference::normal<float, 2>({4, 6}, 1);
    tensor<float, 1> losses({4});
    tensor<std::int32_t, 1> targets({4});
    targets(3) = bad;
    auto const caught = test::error_of<size_error>(
        [&] { (void)ops::cross_entropy(ex, x.view(), losses.view(), targets, {.write_gradient = true}); });
    CHECK(caught.id == "E-ops-004");
    CHECK(caught.says("row 3 is " + std::to_string(bad)));
    CHECK(bits(x) == bits(reference::normal<float, 2>({4, 6}, 1)));
  }
}

TEST_CASE("cross_entropy refuses shapes and options that cannot be") {
  exec::host ex({.threads = 1});
  tensor<float, 2> x({4, 6});
  tensor<float, 1> losses({4}), three({3});
  tensor<std::int32_t, 1> targets({4});
  auto const call = [&](view<float, 1> l, ops::cross_entropy_options<> options) {
    return [&ex, &x, &targets, l, options] { (void)ops::cross_entropy(ex, x.view(), l, targets, options); };
  };
  CHECK(test::error_of<size_error>(call(three.view(), {})).id == "E-ops-001");
  CHECK(test::error_of<config_error>(call(losses.view(), {.label_smoothing = 1.5f})).id == "E-ops-005");
  CHECK(test::error_of<config_error>(call(losses.view(), {.label_smoothing = NAN})).id == "E-ops-005");
  CHECK(test::error_of<config_error>(call(losses.view(), {.z_loss = -1.0f})).id == "E-ops-006");
}
