#include <tessera/ops/gelu.hpp>

#include "fixture.hpp"

using namespace fixture;

namespace {

double exact_gelu(double x, ops::gelu_form form) {
  auto const pi = std::acos(-1.0);
  return form == ops::gelu_form::tanh
             ? 0.5 * x * (1 + std::tanh(std::sqrt(2 / pi) * (x + 0.044715 * x * x * x)))
             : 0.5 * x * (1 + std::erf(x / std::sqrt(2.0)));
}

} // namespace

TEST_CASE_TEMPLATE("gelu and its backward agree with double, in both forms and in place", T, float, bf16,
                   fp16) {
  exec::host ex({.threads = 2});
  for (auto form : {ops::gelu_form::tanh, ops::gelu_form::erf})
    for (auto n : counts) {
      CAPTURE(n);
      auto const in = reference::normal<T, 1>({n}, 1, 2.0f), d_out = reference::normal<T, 1>({n}, 2);
      tensor<T, 1> out({n}), d_in({n});
      ops::gelu(ex, out.view(), in, {.form = form});
      ops::gelu_backward(ex, d_in.view(), d_out, in, {.form = form});

      auto expected = reference::doubles(in.span()), slope = expected;
      auto const dy = reference::doubles(d_out.span());
      for (std::size_t i = 0; i < expected.size(); ++i) {
        auto const x = expected[i];
        slope[i] = dy[i] * (exact_gelu(x + 1e-5, form) - exact_gelu(x - 1e-5, form)) / 2e-5;
        expected[i] = exact_gelu(x, form);
      }
      CHECK(reference::max_relative_error(out, expected) < reference::tolerance<T>());
      CHECK(reference::max_relative_error(d_in, slope) < reference::tolerance<T>());

      auto x = reference::normal<T, 1>({n}, 1, 2.0f), dx = reference::normal<T, 1>({n}, 2);
      ops::gelu_backward(ex, dx.view(), dx, x, {.form = form});
      ops::gelu(ex, x.view(), x, {.form = form});
      CHECK(bits(x) == bits(out));
      CHECK(bits(dx) == bits(d_in));
    }
}

TEST_CASE("gelu of large numbers is the number or zero, its slope one or zero; NaN stays") {
  for (auto x : {30.0f, 1e10f, 3e38f}) {
    CHECK(ops::gelu_value<ops::gelu_form::tanh>(x) == x);
    CHECK(ops::gelu_value<ops::gelu_form::erf>(x) == x);
    CHECK(ops::gelu_value<ops::gelu_form::tanh>(-x) == 0);
    CHECK(ops::gelu_value<ops::gelu_form::erf>(-x) == 0);
    CHECK(ops::gelu_slope<ops::gelu_form::tanh>(x) == 1);
    CHECK(ops::gelu_slope<ops::gelu_form::erf>(x) == 1);
    CHECK(ops::gelu_slope<ops::gelu_form::tanh>(-x) == doctest::Approx(0));
    CHECK(ops::gelu_slope<ops::gelu_form::erf>(-x) == doctest::Approx(0));
  }
  CHECK(std::isnan(ops::gelu_value<ops::gelu_form::tanh>(NAN)));
  CHECK(std::isnan(ops::gelu_slope<ops::gelu_form::erf>(NAN)));
}

TEST_CASE_TEMPLATE("gelu gives the same bits for any number of threads", T, float, bf16) {
  same_bits_for_any_thread_count([](exec::host& ex) {
    index_t const n = 100003;
    auto const in = reference::normal<T, 1>({n}, 1), d_out = reference::normal<T, 1>({n}, 2);
    tensor<T, 1> out({n}), d_in({n});
    ops::gelu(ex, out.view(), in);
    ops::gelu_backward(ex, d_in.view(), d_out, in, {.form = ops::gelu_form::erf});
    return bits(out) + bits(d_in);
  });
}

TEST_CASE("gelu refuses views that do not fit") {
  exec::host ex({.threads = 1});
  tensor<float, 1> three({3}), four({4});
  tensor<float, 2> matrix({4, 2});
  auto const column = view<float, 1>(matrix.data(), {4}, {2});
  CHECK(test::error_of<size_error>([&] { ops::gelu(ex, three.view(), four); }).id == "E-ops-001");
  CHECK(test::error_of<size_error>([&] { ops::gelu(ex, four.view(), column); }).id == "E-ops-003");
  CHECK(test::error_of<size_error>([&] { ops::gelu(ex, column, four); }).id == "E-ops-003");
  CHECK(test::error_of<size_error>([&] { ops::gelu_backward(ex, four.view(), three, four); }).says("d_out"));
}
