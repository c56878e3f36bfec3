#include <tessera/ops/linear.hpp>

#include <array>
#include <cstring>

#include <tessera/exec/host.hpp>

#include <doctest/doctest.h>

#include "support/reference.hpp"

using namespace tessera;
using ops::activation;
using reference::doubles;
using reference::max_relative_error;

namespace {

double gelu(activation form, double x) {
  if (form == activation::none) return x;
  if (form == activation::gelu_erf) return 0.5 * x * (1 + std::erf(x / std::sqrt(2.0)));
  return 0.5 * x * (1 + std::tanh(std::sqrt(2 / 3.14159265358979323846) * (x + 0.044715 * x * x * x)));
}
double gelu_slope(activation form, double x) {
  return (gelu(form, x + 1e-6) - gelu(form, x - 1e-6)) / 2e-6;
}

/// The layer and its gradients by the definition, in double. Row-major [m, k], [n, k], [n], [m, n].
struct exact {
  std::vector<double> pre, out, d_in, d_weight, d_bias;

  exact(index_t m, index_t k, index_t n, std::vector<double> const& in, std::vector<double> const& weight,
        std::vector<double> const& bias, std::vector<double> const& d_out, activation form)
      : d_in(in.size()), d_weight(weight.size()), d_bias(static_cast<std::size_t>(n)) {
    auto const cell = [](index_t row, index_t column, index_t width) {
      return static_cast<std::size_t>(row * width + column);
    };
    for (index_t i = 0; i < m; ++i)
      for (index_t j = 0; j < n; ++j) {
        auto sum = bias.empty() ? 0.0 : bias[static_cast<std::size_t>(j)];
        for (index_t l = 0; l < k; ++l) sum += in[cell(i, l, k)] * weight[cell(j, l, k)];
        pre.push_back(sum);
        out.push_back(gelu(form, sum));
        auto const d = d_out[cell(i, j, n)] * gelu_slope(form, sum);
        d_bias[static_cast<std::size_t>(j)] += d;
        for (index_t l = 0; l < k; ++l) {
          d_in[cell(i, l, k)] += d * weight[cell(j, l, k)];
          d_weight[cell(j, l, k)] += d * in[cell(i, l, k)];
        }
      }
  }
};

template <class T, class G, class Ex>
void compare(Ex& ex, index_t m, index_t k, index_t n, activation form, bool with_bias) {
  CAPTURE(m);
  CAPTURE(k);
  CAPTURE(n);
  CAPTURE(static_cast<int>(form));
  CAPTURE(with_bias);
  auto in = reference::normal<T, 2>({m, k}, 1), weight = reference::normal<T, 2>({n, k}, 2);
  auto d_out = reference::normal<T, 2>({m, n}, 3);
  auto bias = reference::normal<T, 1>({with_bias ? n : 0}, 4);
  tensor<T, 2> out({m, n}), pre({m, n}), d_in({m, k}), scratch({m, n});
  tensor<G, 2> d_weight({n, k});
  tensor<G, 1> d_bias({with_bias ? n : 0});
  exact const expected(m, k, n, doubles(in.span()), doubles(weight.span()), doubles(bias.span()),
                       doubles(d_out.span()), form);

  ops::linear(ex, out.view(), in, weight, bias, {.activation = form});
  CHECK(max_relative_error(out, expected.out) < reference::tolerance<T>());
  ops::linear(ex, out.view(), in, weight, bias, {.activation = form, .pre_activation = pre});
  CHECK(max_relative_error(out, expected.out) < reference::tolerance<T>());
  CHECK(max_relative_error(pre, expected.pre) < reference::tolerance<T>());

  ops::linear_gradients<T, G> const gradients{d_in, d_weight, d_bias};
  for (bool own_scratch : {false, true}) {
    ops::linear_backward(
        ex, gradients, d_out, in, weight,
        {.activation = form, .pre_activation = pre, .scratch = own_scratch ? scratch.view() : view<T, 2>{}});
    CHECK(max_relative_error(d_in, expected.d_in) < reference::tolerance<T>());
    CHECK(max_relative_error(d_weight, expected.d_weight) < 2 * reference::tolerance<T>());
    if (with_bias) CHECK(max_relative_error(d_bias, expected.d_bias) < 2 * reference::tolerance<T>());
  }
  auto const doubled = [](std::vector<double> values) {
    for (auto& value : values) value *= 2;
    return values;
  };
  ops::linear_backward(
      ex, gradients, d_out, in, weight,
      {.accumulate = true, .accumulate_input = true, .activation = form, .pre_activation = pre});
  CHECK(max_relative_error(d_in, doubled(expected.d_in)) < 2 * reference::tolerance<T>());
  CHECK(max_relative_error(d_weight, doubled(expected.d_weight)) < 2 * reference::tolerance<T>());
  if (with_bias) CHECK(max_relative_error(d_bias, doubled(expected.d_bias)) < 2 * reference::tolerance<T>());
}

/// An output of another type than the operands, within the tolerance of the output's.
template <class Out, class T>
void compare_into(exec::host& ex, index_t m, index_t k, index_t n) {
  CAPTURE(m);
  CAPTURE(k);
  CAPTURE(n);
  auto const in = reference::normal<T, 2>({m, k}, 1), weight = reference::normal<T, 2>({n, k}, 2);
  tensor<Out, 2> out({m, n});
  tensor<T, 2> pre({m, n});
  for (auto form : {activation::none, activation::gelu_tanh, activation::gelu_erf})
    for (bool with_bias : {false, true}) {
      auto const bias = reference::normal<T, 1>({with_bias ? n : 0}, 4);
      exact const expected(m, k, n, doubles(in.span()), doubles(weight.span()), doubles(bias.span()),
                           std::vector<double>(static_cast<std::size_t>(m * n)), form);
      ops::linear(ex, out.view(), in, weight, bias, {.activation = form});
      CHECK(max_relative_error(out, expected.out) < reference::tolerance<Out>());
      for (auto& value : out.span()) value = Out(NAN);
      ops::linear(ex, out.view(), in, weight, bias, {.activation = form, .pre_activation = pre});
      CHECK(max_relative_error(out, expected.out) < reference::tolerance<Out>());
      CHECK(max_relative_error(pre, expected.pre) < reference::tolerance<T>());
    }
}

template <class Storage, class Gradient>
struct types {
  using T = Storage;
  using G = Gradient;
};

} // namespace

TEST_CASE_TEMPLATE("linear and its gradients are those of float64, by either policy", Ex, exec::host,
                   exec::basic_host<exec::portable_product>) {
  Ex ex({.threads = reference::threads(2)});
  for (auto form : {activation::none, activation::gelu_tanh, activation::gelu_erf})
    for (bool with_bias : {false, true}) {
      compare<float, float>(ex, 1, 1, 1, form, with_bias);
      compare<float, float>(ex, 7, 13, 31, form, with_bias);
      compare<float, float>(ex, 65, 33, 300, form, with_bias);
    }
  compare<bf16, float>(ex, 37, 41, 43, activation::gelu_tanh, true);
  compare<bf16, bf16>(ex, 37, 41, 43, activation::gelu_erf, true);
  compare<bf16, bf16>(ex, 37, 41, 43, activation::none, true);
  compare<fp16, float>(ex, 19, 21, 23, activation::gelu_tanh, false);
}

TEST_CASE("more rows than one cache block join up") {
  exec::host ex({.threads = reference::threads(2)});
  compare<float, float>(ex, 530, 3, 4100, activation::gelu_tanh, true);
}

TEST_CASE("an output of another type than the operands is as exact as its own type allows") {
  exec::host ex({.threads = reference::threads(2)});
  for (auto const& [m, k, n] : {std::array<index_t, 3>{1, 1, 1}, {0, 3, 2}, {7, 13, 31}, {37, 41, 43}}) {
    compare_into<float, bf16>(ex, m, k, n);
    compare_into<float, fp16>(ex, m, k, n);
    compare_into<bf16, float>(ex, m, k, n);
  }
  compare_into<float, bf16>(ex, 530, 3, 4100); // more rows than a block
}

TEST_CASE("sizes of zero: no rows give zero gradients, no inputs give the bias") {
  exec::host ex({.threads = 1});
  tensor<float, 2> none({0, 3}), weight({2, 3}), out({0, 2}), d_weight({2, 3});
  tensor<float, 1> bias({2}), d_bias({2});
  reference::fill_normal(bias.span(), 1);
  reference::fill_normal(d_weight.span(), 1);
  reference::fill_normal(d_bias.span(), 1);
  ops::linear(ex, out.view(), none, weight, bias);
  ops::linear_backward(ex, ops::linear_gradients<float, float>{none, d_weight, d_bias}, out, none, weight);
  for (auto value : d_weight.span()) CHECK(value == 0);
  for (auto value : d_bias.span()) CHECK(value == 0);

  tensor<float, 2> in({3, 0}), no_weight({2, 0}), rows({3, 2});
  ops::linear(ex, rows.view(), in, no_weight, bias);
  for (index_t i = 0; i < 3; ++i) CHECK(rows(i, 1) == bias(1));
  tensor<float, 2> no_out({3, 0}), empty_weight({0, 4}), wide({3, 4}), d_wide({3, 4});
  reference::fill_normal(d_wide.span(), 1);
  ops::linear_backward(ex, ops::linear_gradients<float, float>{d_wide, empty_weight, {}}, no_out, wide,
                       empty_weight);
  for (auto value : d_wide.span()) CHECK(value == 0);
}

TEST_CASE("gradients left out are not computed, and d_out may serve as scratch") {
  exec::host ex({.threads = 1});
  auto in = reference::normal<float, 2>({5, 6}, 1), weight = reference::normal<float, 2>({7, 6}, 2);
  auto d_out = reference::normal<float, 2>({5, 7}, 3), pre = reference::normal<float, 2>({5, 7}, 4);
  tensor<float, 2> d_in({5, 6}), d_weight({7, 6}), expected({7, 6});
  ops::linear_backward(ex, ops::linear_gradients<float, float>{.weight = expected}, d_out, in, weight,
                       {.activation = activation::gelu_tanh, .pre_activation = pre});
  ops::linear_backward(ex, ops::linear_gradients<float, float>{.input = d_in, .weight = d_weight}, d_out, in,
                       weight,
                       {.activation = activation::gelu_tanh, .pre_activation = pre, .scratch = d_out});
  CHECK(max_relative_error(d_weight, doubles(expected.span())) == 0);
}

TEST_CASE_TEMPLATE("the backward in two calls, each without what it does not read, is the backward in one", P,
                   types<float, float>, types<bf16, float>, types<bf16, bf16>) {
  using T = typename P::T;
  using G = typename P::G;
  exec::host ex({.threads = reference::threads(2)});
  for (auto form : {activation::none, activation::gelu_tanh, activation::gelu_erf})
    for (auto of_input : {activation::none, activation::gelu_tanh})
      for (auto accumulate : {false, true})
        for (auto const& [m, k, n] : {std::array<index_t, 3>{1, 1, 1}, {9, 13, 7}, {0, 3, 2}, {300, 5, 17}}) {
          auto const in = reference::normal<T, 2>({m, k}, 1), weight = reference::normal<T, 2>({n, k}, 2),
                     d_out = reference::normal<T, 2>({m, n}, 3), pre = reference::normal<T, 2>({m, n}, 4),
                     before = reference::normal<T, 2>({m, k}, 5);
          tensor<T, 2> d_in({m, k}), d_in_alone({m, k}), d_pre({m, n});
          auto d_weight = reference::normal<G, 2>({n, k}, 6),
               d_weight_alone = reference::normal<G, 2>({n, k}, 6);
          auto d_bias = reference::normal<G, 1>({n}, 7), d_bias_alone = reference::normal<G, 1>({n}, 7);
          ops::linear_backward(ex, ops::linear_gradients<T, G>{d_in, d_weight, d_bias}, d_out, in, weight,
                               {.accumulate = accumulate,
                                .activation = form,
                                .pre_activation = pre,
                                .input_activation = of_input,
                                .input_pre_activation = before});
          ops::linear_backward(ex, ops::linear_gradients<T, G>{.input = d_in_alone}, d_out, {}, weight,
                               {.activation = form,
                                .pre_activation = pre,
                                .input_activation = of_input,
                                .input_pre_activation = before,
                                .scratch = d_pre});
          view<T const, 2> const rest = form == activation::none ? d_out.view() : d_pre.view();
          ops::linear_backward(ex, ops::linear_gradients<T, G>{{}, d_weight_alone, d_bias_alone}, rest, in,
                               {}, {.accumulate = accumulate});
          auto const same = [](auto const& a, auto const& b) {
            return a.size() == 0 || std::memcmp(a.data(), b.data(), a.span().size_bytes()) == 0;
          };
          CHECK(same(d_in, d_in_alone));
          CHECK(same(d_weight, d_weight_alone));
          // Behind an activation one call sums the bias before rounding, two after it.
          if (form == activation::none) CHECK(same(d_bias, d_bias_alone));
          CHECK(max_relative_error(d_bias_alone, doubles(d_bias.span())) < reference::tolerance<T>());
        }
}

TEST_CASE("what a gradient reads may not be left out with it") {
  exec::host ex({.threads = 1});
  tensor<float, 2> in({2, 3}), weight({4, 3}), d_out({2, 4}), d_in({2, 3}), d_weight({4, 3}), wrong({4, 2});
  using gradients = ops::linear_gradients<float, float>;
  CHECK_THROWS_AS(ops::linear_backward(ex, gradients{.input = d_in}, d_out, in, {}), size_error);
  CHECK_THROWS_AS(ops::linear_backward(ex, gradients{.weight = d_weight}, d_out, {}, weight), size_error);
  CHECK_THROWS_AS(ops::linear_backward(ex, gradients{.weight = d_weight}, d_out, in, wrong), size_error);
  CHECK_THROWS_AS(ops::linear_backward(ex, gradients{.input = d_in}, d_out, wrong, weight), size_error);
}

TEST_CASE("gradients through an activation agree with finite differences") {
  exec::host ex({.threads = 1});
  auto in = reference::normal<float, 2>({3, 4}, 1), weight = reference::normal<float, 2>({5, 4}, 2);
  auto weights = reference::normal<float, 2>({3, 5}, 3);
  auto bias = reference::normal<float, 1>({5}, 4);
  tensor<float, 2> out({3, 5}), pre({3, 5}), d_in({3, 4}), d_weight({5, 4});
  tensor<float, 1> d_bias({5});
  for (auto form : {activation::gelu_tanh, activation::gelu_erf}) {
    auto const loss = [&] {
      ops::linear(ex, out.view(), in, weight, bias, {.activation = form, .pre_activation = pre});
      double total = 0;
      for (std::size_t i = 0; i < out.span().size(); ++i)
        total += static_cast<double>(out.span()[i]) * static_cast<double>(weights.span()[i]);
      return total;
    };
    loss();
    ops::linear_backward(ex, ops::linear_gradients<float, float>{d_in, d_weight, d_bias}, weights, in, weight,
                         {.activation = form, .pre_activation = pre});
    auto const check = [&](std::span<float> values, std::span<float> gradient) {
      for (std::size_t i = 0; i < values.size(); ++i)
        CHECK(std::fabs(reference::central_difference(values[i], 1e-2f, loss) -
                        static_cast<double>(gradient[i])) < 2e-3);
    };
    check(in.span(), d_in.span());
    check(weight.span(), d_weight.span());
    check(bias.span(), d_bias.span());
  }
}

TEST_CASE_TEMPLATE("the gradient before the input's activation is the input's times the slope", T, float,
                   bf16) {
  exec::host ex({.threads = reference::threads(2)});
  index_t const m = 300, k = 17, n = 5; // more rows than a block
  auto in = reference::normal<T, 2>({m, k}, 1), before = reference::normal<T, 2>({m, k}, 2);
  auto weight = reference::normal<T, 2>({n, k}, 3), d_out = reference::normal<T, 2>({m, n}, 4);
  tensor<T, 2> d_in({m, k});
  for (auto form : {activation::none, activation::gelu_tanh, activation::gelu_erf}) {
    ops::linear_backward(ex, ops::linear_gradients<T, T>{d_in, {}, {}}, d_out, in, weight,
                         {.input_activation = form, .input_pre_activation = before});
    std::vector<double> expected;
    for (index_t i = 0; i < m; ++i)
      for (index_t l = 0; l < k; ++l) {
        double sum = 0;
        for (index_t j = 0; j < n; ++j)
          sum += static_cast<double>(static_cast<float>(d_out(i, j))) *
                 static_cast<double>(static_cast<float>(weight(j, l)));
        expected.push_back(sum * gelu_slope(form, static_cast<double>(static_cast<float>(before(i, l)))));
      }
    CHECK(max_relative_error(d_in, expected) < reference::tolerance<T>());
  }
  CHECK_THROWS_AS(ops::linear_backward(ex, ops::linear_gradients<T, T>{d_in, {}, {}}, d_out, in, weight,
                                       {.accumulate_input = true,
                                        .input_activation = activation::gelu_tanh,
                                        .input_pre_activation = before}),
                  config_error);
  CHECK_THROWS_AS(ops::linear_backward(ex, ops::linear_gradients<T, T>{d_in, {}, {}}, d_out, in, weight,
                                       {.input_activation = activation::gelu_tanh}),
                  size_error); // input_pre_activation is missing
}

TEST_CASE("linear refuses shapes that do not fit") {
  exec::host ex({.threads = 1});
  tensor<float, 2> in({2, 3}), weight({4, 3}), wrong({4, 2}), out({2, 4});
  tensor<float, 1> bias({5}), none;
  CHECK_THROWS_AS(ops::linear(ex, out.view(), in, wrong, none), size_error);
  CHECK_THROWS_AS(ops::linear(ex, out.view(), in, weight, bias), size_error);
  CHECK_THROWS_AS(ops::linear(ex, in.view(), in, weight, none), size_error);
  CHECK_THROWS_AS(ops::linear(ex, out.view(), in, weight, none, {.pre_activation = in}), size_error);
  CHECK_THROWS_AS(ops::linear_backward(ex, ops::linear_gradients<float, float>{in, weight, {}}, out, in,
                                       weight, {.activation = activation::gelu_tanh}),
                  size_error); // pre_activation is missing
}
