#include <tessera/ops/reduce.hpp>

#include "fixture.hpp"

using namespace fixture;

TEST_CASE_TEMPLATE("sums agree with a plain loop in double", T, float, bf16, fp16) {
  exec::host ex({.threads = 2});
  for (auto n : counts) {
    CAPTURE(n);
    auto const x = reference::normal<T, 1>({n}, 4);
    double sum = 0, squares = 0, magnitudes = 0;
    for (auto v : reference::doubles(x.span())) {
      sum += v;
      squares += v * v;
      magnitudes += std::fabs(v);
    }
    CHECK(std::fabs(ops::sum(ex, x.view()) - sum) <= 1e-12 * magnitudes);
    CHECK(std::fabs(ops::sum_of_squares(ex, x.view()) - squares) <= 1e-12 * squares);
    CHECK(ops::all_finite(ex, x.view()));
  }
}

TEST_CASE("squares neither overflow nor vanish") {
  exec::host ex({.threads = 1});
  tensor<float, 1> x({33});
  for (auto& v : x.span()) v = 1e30f;
  CHECK(ops::sum_of_squares(ex, x.view()) == doctest::Approx(33e60));
  for (auto& v : x.span()) v = 1e-30f;
  CHECK(ops::sum_of_squares(ex, x.view()) == doctest::Approx(33e-60));
}

TEST_CASE_TEMPLATE("one element that is not finite is found wherever it stands", T, float, bf16, fp16) {
  exec::host ex({.threads = 2});
  for (float bad : {NAN, INFINITY, -INFINITY})
    for (index_t at : {0, 15, 16, 16383, 16384, 40008}) {
      auto x = reference::normal<T, 1>({40009}, 5);
      x(at) = T(bad);
      CHECK_FALSE(ops::all_finite(ex, x.view()));
      CHECK_FALSE(std::isfinite(ops::sum_of_squares(ex, x.view())));
    }
}

TEST_CASE("sums have the same bits for any number of threads") {
  auto const x = reference::normal<float, 1>({300007}, 6);
  same_bits_for_any_thread_count([&](exec::host& ex) {
    tensor<double, 1> sums({2});
    sums(0) = ops::sum(ex, x.view());
    sums(1) = ops::sum_of_squares(ex, x.view());
    return bits(sums);
  });
}

TEST_CASE("sums refuse a view with gaps") {
  exec::host ex({.threads = 1});
  tensor<float, 2> matrix({4, 2});
  auto const column = view<float, 1>(matrix.data(), {4}, {2});
  CHECK(test::error_of<size_error>([&] { (void)ops::sum(ex, column); }).id == "E-ops-003");
  CHECK(test::error_of<size_error>([&] { (void)ops::all_finite(ex, column); }).says("all_finite"));
}
