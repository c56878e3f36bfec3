#include <tessera/ops/sliced_cross_entropy.hpp>

#include "sliced_fixture.hpp"

using namespace sliced_fixture;

namespace {

/// What ranks with these slices of logits come to, one after the other in one process.
template <class T>
struct ranks_of {
  tensor<T, 2> logits;
  tensor<float, 1> losses;
  tensor<float, 2> merged;
  ops::sum_and_count total;

  ranks_of(exec::host& ex, tensor<T, 2> const& x, tensor<std::int32_t, 1> const& targets,
           std::vector<index_t> const& cuts, ops::sliced_cross_entropy_options<> options)
      : logits(x.extents()), losses({x.extent(0)}), merged({x.extent(0), 4}) {
    auto const ranks = static_cast<index_t>(cuts.size()) - 1, classes = x.extent(1);
    for (index_t i = 0; i < x.size(); ++i) logits.data()[i] = x.data()[i];
    tensor<float, 3> parts({ranks, x.extent(0), 4});
    auto const slice = [&](index_t rank) {
      return logits.view().slice(1, cuts[static_cast<std::size_t>(rank)],
                                 cuts[static_cast<std::size_t>(rank) + 1]);
    };
    options.classes = classes;
    for (index_t rank = 0; rank < ranks; ++rank)
      ops::softmax_statistics(ex, parts.view()[rank], slice(rank), targets,
                              {.first_class = cuts[static_cast<std::size_t>(rank)], .classes = classes});
    ops::merge_softmax_statistics(ex, merged.view(), parts);
    for (index_t rank = 0; rank < ranks; ++rank) {
      options.first_class = cuts[static_cast<std::size_t>(rank)];
      for (auto& loss : losses.span()) loss = NAN;
      auto const mine = ops::cross_entropy_of(ex, slice(rank), losses.view(), targets, merged, options);
      if (rank > 0) CHECK((mine.sum == total.sum || std::isnan(total.sum))); // every rank has the whole loss
      total = mine;
    }
  }
};

} // namespace

TEST_CASE_TEMPLATE("losses and gradients of a cut vocabulary are those of float64, however it is cut", T,
                   float, bf16, fp16) {
  exec::host ex({.threads = 2});
  for (auto const size : {shape{0, 5}, {1, 1}, {4, 2}, {7, 129}, {67, 17}, {2, 4111}})
    for (auto const& options :
         {ops::sliced_cross_entropy_options<>{.write_gradient = true},
          {.label_smoothing = 0.1f, .gradient_scale = 3.0f, .write_gradient = true},
          {.label_smoothing = 1.0f, .write_gradient = true},
          {.label_smoothing = 0.2f, .z_loss = 1e-2f, .gradient_scale = 0.5f, .write_gradient = true}}) {
      auto const rows = size.rows, classes = size.width;
      CAPTURE(rows);
      CAPTURE(classes);
      auto const x = reference::normal<T, 2>({rows, classes}, 1, 3.0f);
      auto const targets = some_targets(rows, classes);
      exact const expected(reference::doubles(x.span()), rows, classes, targets.span(), options);
      for (auto const& cuts : cuts_of(classes)) {
        ranks_of<T> const got(ex, x, targets, cuts, options);
        CHECK(got.total.sum == doctest::Approx(expected.sum).epsilon(1e-6));
        CHECK(got.total.count == expected.count);
        if (classes == 1) continue; // nothing is left of either but rounding
        CHECK(reference::max_relative_error(got.losses, expected.losses) < 1e-5);
        CHECK(reference::max_relative_error(got.logits, expected.gradient) < reference::tolerance<T>());
      }
    }
}

TEST_CASE("without .write_gradient the logits stay, and totals are added to where the space runs") {
  exec::host ex({.threads = 2});
  auto const x = reference::normal<float, 2>({5, 9}, 1);
  auto const targets = some_targets(5, 9);
  tensor<double, 1> totals({2});
  totals(0) = 10, totals(1) = 1;
  ranks_of<float> const got(ex, x, targets, {0, 9}, {.totals = totals});
  exact const expected(reference::doubles(x.span()), 5, 9, targets.span(),
                       ops::sliced_cross_entropy_options<>{});
  CHECK(bits(got.logits) == bits(x));
  CHECK(got.total.count == 0);
  CHECK(totals(0) == doctest::Approx(10 + expected.sum));
  CHECK(totals(1) == 1 + expected.count);
}

TEST_CASE("statistics of one rank lose nothing: the losses are those of cross_entropy") {
  exec::host ex({.threads = 1});
  auto const x = reference::normal<float, 2>({31, 5003}, 1, 4.0f);
  auto const targets = some_targets(31, 5003);
  tensor<float, 1> losses({31});
  auto whole = reference::normal<float, 2>({31, 5003}, 1, 4.0f);
  ops::cross_entropy(ex, whole.view(), losses.view(), targets, {.write_gradient = true});
  ranks_of<float> const got(ex, x, targets, {0, 1700, 5003}, {.write_gradient = true});
  CHECK(reference::max_relative_error(got.losses, reference::doubles(losses.span())) < 1e-6);
  CHECK(reference::max_relative_error(got.logits, reference::doubles(whole.span())) < 1e-6);
}

TEST_CASE("logits far apart between ranks neither overflow nor vanish") {
  exec::host ex({.threads = 1});
  auto const inf = std::numeric_limits<float>::infinity();
  tensor<float, 2> x({6, 4});
  float const rows[6][4] = {{3e38f, 1, -3e38f, 2},    {-inf, -inf, 1, 2},    {1000, 999, -1000, -999},
                            {-3e38f, -3e38f, -1, -2}, {-inf, 0, -inf, -inf}, {88, 88, 88, 88}};
  std::int32_t const target[] = {0, 2, 1, 3, 1, 3};
  tensor<std::int32_t, 1> targets({6});
  for (index_t r = 0; r < 6; ++r) {
    targets(r) = target[r];
    for (index_t i = 0; i < 4; ++i) x(r, i) = rows[r][i];
  }
  exact const expected(reference::doubles(x.span()), 6, 4, targets.span(),
                       ops::sliced_cross_entropy_options<>{});
  for (auto const& cuts : {std::vector<index_t>{0, 2, 4}, {0, 1, 2, 3, 4}, {0, 0, 4}}) {
    ranks_of<float> const got(ex, x, targets, cuts, {.write_gradient = true});
    for (index_t r = 0; r < 6; ++r) {
      CAPTURE(r);
      CHECK(got.losses(r) ==
            doctest::Approx(expected.losses[static_cast<std::size_t>(r)]).epsilon(1e-7).scale(1000));
      for (index_t i = 0; i < 4; ++i)
        CHECK(got.logits(r, i) == doctest::Approx(expected.gradient[static_cast<std::size_t>(r * 4 + i)]));
    }
  }
}

TEST_CASE("a NaN among one rank's logits reaches the loss and the gradient of that row on every rank") {
  exec::host ex({.threads = 1});
  auto x = reference::normal<float, 2>({3, 6}, 1);
  x(1, 4) = NAN;
  tensor<std::int32_t, 1> targets({3});
  ranks_of<float> const got(ex, x, targets, {0, 3, 6}, {.write_gradient = true});
  for (index_t r = 0; r < 3; ++r) {
    CHECK(std::isnan(got.losses(r)) == (r == 1));
    for (index_t i = 0; i < 6; ++i) CHECK(std::isnan(got.logits(r, i)) == (r == 1));
  }
}

TEST_CASE("one part is merged to itself, and parts may be merged in their own place") {
  exec::host ex({.threads = 1});
  auto parts = reference::normal<float, 3>({3, 5, 4}, 1);
  for (index_t rank = 0; rank < 3; ++rank)
    for (index_t r = 0; r < 5; ++r) parts(rank, r, 1) = std::fabs(parts(rank, r, 1));
  tensor<float, 2> one({5, 4}), all({5, 4});
  ops::merge_softmax_statistics(ex, one.view(), parts.view().slice(0, 1, 2));
  for (index_t i = 0; i < 20; ++i) CHECK(one.data()[i] == (&parts(1, 0, 0))[i]);
  ops::merge_softmax_statistics(ex, all.view(), parts);
  for (index_t r = 0; r < 5; ++r) {
    double largest = -INFINITY, sum = 0, logits = 0, target = 0;
    for (index_t k = 0; k < 3; ++k) largest = std::fmax(largest, static_cast<double>(parts(k, r, 0)));
    for (index_t k = 0; k < 3; ++k) {
      sum += static_cast<double>(parts(k, r, 1)) * std::exp(static_cast<double>(parts(k, r, 0)) - largest);
      logits += static_cast<double>(parts(k, r, 2));
      target += static_cast<double>(parts(k, r, 3));
    }
    CHECK(static_cast<double>(all(r, 0)) == largest);
    CHECK(all(r, 1) == doctest::Approx(sum));
    CHECK(all(r, 2) == doctest::Approx(logits));
    CHECK(all(r, 3) == doctest::Approx(target));
  }
  ops::merge_softmax_statistics(ex, parts.view()[0], parts);
  for (index_t i = 0; i < 20; ++i) CHECK(parts.data()[i] == all.data()[i]);
}

TEST_CASE("a cut vocabulary gives the same bits for any number of threads") {
  auto const targets = some_targets(67, 3001);
  same_bits_for_any_thread_count([&](exec::host& ex) {
    auto const x = reference::normal<bf16, 2>({67, 3001}, 1, 2.0f);
    ranks_of<bf16> const got(ex, x, targets, {0, 1000, 3001},
                             {.label_smoothing = 0.1f, .write_gradient = true});
    return bits(got.logits) + bits(got.losses) + bits(got.merged);
  });
}

TEST_CASE("slices that are none, bad targets and shapes that differ are refused before anything is written") {
  exec::host ex({.threads = 1});
  auto x = reference::normal<float, 2>({2, 4}, 1);
  auto const before = bits(x);
  tensor<float, 2> statistics({2, 4}), narrow({2, 3});
  tensor<float, 1> losses({2});
  tensor<std::int32_t, 1> targets({2});
  auto const statistics_of = [&](ops::softmax_statistics_options options) {
    return test::error_of<size_error>(
        [&] { ops::softmax_statistics(ex, statistics.view(), x.view(), targets, options); });
  };
  auto const finish = [&](ops::sliced_cross_entropy_options<> options) {
    options.write_gradient = true;
    ops::cross_entropy_of(ex, x.view(), losses.view(), targets, statistics, options);
  };
  CHECK(statistics_of({.first_class = 1}).id == "E-ops-014");
  CHECK(statistics_of({.first_class = -1, .classes = 9}).id == "E-ops-014");
  CHECK(statistics_of({.first_class = 6, .classes = 9}).says("6 + 4"));
  CHECK(test::error_of<size_error>([&] { finish({.classes = 3}); }).id == "E-ops-014");
  CHECK(test::error_of<config_error>([&] { finish({.label_smoothing = 2}); }).id == "E-ops-005");
  CHECK(test::error_of<config_error>([&] { finish({.z_loss = -1}); }).id == "E-ops-006");
  targets(1) = 9;
  CHECK(statistics_of({.first_class = 2, .classes = 9}).id == "E-ops-004");
  CHECK(test::error_of<size_error>([&] { finish({.first_class = 2, .classes = 9}); }).says("row 1 is 9"));
  CHECK(test::error_of<size_error>([&] {
          ops::softmax_statistics(ex, narrow.view(), x.view(), targets);
        }).id == "E-ops-001");
  CHECK(test::error_of<size_error>([&] {
          ops::merge_softmax_statistics(ex, narrow.view(), tensor<float, 3>({1, 2, 4}));
        }).id == "E-ops-001");
  CHECK(bits(x) == before);
}
