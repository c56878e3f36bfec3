#include <tessera/ops/cuda/linear.cuh>

#include <algorithm>
#include <array>

#include <doctest/doctest.h>

#include "support/cuda.hpp"
#include "support/reference.hpp"
#include "support/thrown.hpp"
#if defined(TESSERA_CUDA_EMULATION)
#include <cuda_emulation/cublaslt.hpp>
#endif

using namespace tessera;
using ops::activation;
using reference::doubles;
using reference::max_relative_error;
using test::on_device;
using test::placement;

namespace {

double gelu(activation form, double x) {
  if (form == activation::none) return x;
  if (form == activation::gelu_erf) return 0.5 * x * (1 + std::erf(x / std::sqrt(2.0)));
  return 0.5 * x * (1 + std::tanh(std::sqrt(2 / 3.14159265358979323846) * (x + 0.044715 * x * x * x)));
}
double gelu_slope(activation form, double x) {
  return (gelu(form, x + 1e-6) - gelu(form, x - 1e-6)) / 2e-6;
}

struct sizes {
  index_t m, k, n;
};

/// The layer and its gradients by the definition, in double. `before` is what `in` is the activation of.
struct exact {
  std::vector<double> pre, out, d_in, d_before, d_weight, d_bias;

  exact(sizes s, std::vector<double> const& in, std::vector<double> const& weight,
        std::vector<double> const& bias, std::vector<double> const& d_out, std::vector<double> const& before,
        activation form)
      : d_in(in.size()), d_before(in.size()), d_weight(weight.size()), d_bias(bias.size()) {
    auto const cell = [](index_t row, index_t column, index_t width) {
      return static_cast<std::size_t>(row * width + column);
    };
    for (index_t i = 0; i < s.m; ++i)
      for (index_t j = 0; j < s.n; ++j) {
        auto sum = bias.empty() ? 0.0 : bias[static_cast<std::size_t>(j)];
        for (index_t l = 0; l < s.k; ++l) sum += in[cell(i, l, s.k)] * weight[cell(j, l, s.k)];
        pre.push_back(sum);
        out.push_back(gelu(form, sum));
        auto const d = d_out[cell(i, j, s.n)] * gelu_slope(form, sum);
        if (!bias.empty()) d_bias[static_cast<std::size_t>(j)] += d;
        for (index_t l = 0; l < s.k; ++l) {
          d_in[cell(i, l, s.k)] += d * weight[cell(j, l, s.k)];
          d_weight[cell(j, l, s.k)] += d * in[cell(i, l, s.k)];
        }
      }
    for (std::size_t i = 0; i < in.size(); ++i)
      d_before[i] = d_in[i] * gelu_slope(activation::gelu_tanh, before[i]);
  }
};

std::vector<double> doubled(std::vector<double> values) {
  for (auto& value : values) value *= 2;
  return values;
}

template <class T, class G>
void compare(exec::cuda& ex, sizes s, activation form, bool with_bias, placement where = {}) {
  CAPTURE(s.m);
  CAPTURE(s.k);
  CAPTURE(s.n);
  CAPTURE(static_cast<int>(form));
  CAPTURE(with_bias);
  CAPTURE(where.offset);
  auto const bias_extents = extents<1>{with_bias ? s.n : 0};
  auto const in = reference::normal<T, 2>({s.m, s.k}, 1),
             weight = reference::normal<T, 2>({s.n, s.k}, 2, 0.3f),
             d_out = reference::normal<T, 2>({s.m, s.n}, 3), before = reference::normal<T, 2>({s.m, s.k}, 5);
  auto const bias = reference::normal<T, 1>(bias_extents, 4);
  exact const expected(s, doubles(in.span()), doubles(weight.span()), doubles(bias.span()),
                       doubles(d_out.span()), doubles(before.span()), form);
  constexpr auto tolerance = reference::tolerance<T>();

  on_device<T, 2> x(ex, in, where), w(ex, weight, where), dy(ex, d_out, where), x_before(ex, before, where);
  on_device<T, 1> b(ex, bias, {.offset = where.offset});
  auto const bias_view = with_bias ? b.view() : test::device_view<T, 1>();
  on_device<T, 2> y(ex, {s.m, s.n}, where), pre(ex, {s.m, s.n}, where);
  ops::linear(ex, y.view(), x.view(), w, bias_view, {.activation = form});
  CHECK(max_relative_error(y.read(ex), expected.out) < tolerance);
  ops::linear(ex, y.view(), x.view(), w, bias_view, {.activation = form, .pre_activation = pre});
  CHECK(max_relative_error(y.read(ex), expected.out) < tolerance);
  CHECK(max_relative_error(pre.read(ex), expected.pre) < tolerance);

  on_device<T, 2> dx(ex, {s.m, s.k}, where), scratch(ex, {s.m, s.n}, where);
  on_device<G, 2> dw(ex, {s.n, s.k}, where);
  on_device<G, 1> db(ex, bias_extents, {.offset = where.offset});
  ops::linear_gradients<T, G, exec::cuda_memory> const gradients{
      dx, dw, with_bias ? db.view() : test::device_view<G, 1>()};
  auto const check = [&](std::vector<double> const& d_in, std::vector<double> const& d_weight,
                         std::vector<double> const& d_bias) {
    CHECK(max_relative_error(dx.read(ex), d_in) < 2 * tolerance);
    constexpr auto of_parameters = std::max(tolerance, reference::tolerance<G>());
    CHECK(max_relative_error(dw.read(ex), d_weight) < 2 * of_parameters);
    if (with_bias) CHECK(max_relative_error(db.read(ex), d_bias) < 2 * of_parameters);
  };
  for (bool own_scratch : {false, true}) {
    ops::linear_backward(ex, gradients, dy, x, w,
                         {.activation = form,
                          .pre_activation = pre,
                          .scratch = own_scratch ? scratch.view() : test::device_view<T, 2>()});
    check(expected.d_in, expected.d_weight, expected.d_bias);
  }
  ops::linear_backward(
      ex, gradients, dy, x, w,
      {.accumulate = true, .accumulate_input = true, .activation = form, .pre_activation = pre});
  check(doubled(expected.d_in), doubled(expected.d_weight), doubled(expected.d_bias));
  ops::linear_backward(ex, gradients, dy, x, w,
                       {.activation = form,
                        .pre_activation = pre,
                        .input_activation = activation::gelu_tanh,
                        .input_pre_activation = x_before});
  check(expected.d_before, expected.d_weight, expected.d_bias);
}

/// An output of another type than the operands, within the tolerance of the output's.
template <class Out, class T>
void compare_into(exec::cuda& ex, sizes s, placement where = {}) {
  CAPTURE(s.m);
  CAPTURE(s.k);
  CAPTURE(s.n);
  CAPTURE(where.offset);
  auto const in = reference::normal<T, 2>({s.m, s.k}, 1),
             weight = reference::normal<T, 2>({s.n, s.k}, 2, 0.3f);
  on_device<T, 2> x(ex, in, where), w(ex, weight, where), pre(ex, {s.m, s.n}, where);
  on_device<Out, 2> y(ex, {s.m, s.n}, where);
  for (auto form : {activation::none, activation::gelu_tanh, activation::gelu_erf})
    for (bool with_bias : {false, true}) {
      auto const bias = reference::normal<T, 1>({with_bias ? s.n : 0}, 4);
      on_device<T, 1> b(ex, bias, {.offset = where.offset});
      auto const bias_view = with_bias ? b.view() : test::device_view<T, 1>();
      exact const expected(s, doubles(in.span()), doubles(weight.span()), doubles(bias.span()),
                           std::vector<double>(static_cast<std::size_t>(s.m * s.n)), doubles(in.span()),
                           form);
      ops::linear(ex, y.view(), x.view(), w, bias_view, {.activation = form});
      CHECK(max_relative_error(y.read(ex), expected.out) < reference::tolerance<Out>());
      ops::linear(ex, y.view(), x.view(), w, bias_view, {.activation = form, .pre_activation = pre});
      CHECK(max_relative_error(y.read(ex), expected.out) < reference::tolerance<Out>());
      CHECK(max_relative_error(pre.read(ex), expected.pre) < reference::tolerance<T>());
    }
}

void compare_all(exec::cuda& ex) {
  for (auto form : {activation::none, activation::gelu_tanh, activation::gelu_erf})
    for (bool with_bias : {false, true}) {
      compare<float, float>(ex, {1, 1, 1}, form, with_bias);
      compare<float, float>(ex, {7, 13, 31}, form, with_bias, {.offset = 1, .gap = 3});
      compare<float, float>(ex, {8, 16, 24}, form, with_bias);
      compare<bf16, float>(ex, {8, 16, 24}, form, with_bias);
      compare<bf16, bf16>(ex, {8, 16, 24}, form, with_bias);
      compare<bf16, float>(ex, {9, 11, 13}, form, with_bias, {.offset = 3, .gap = 2});
    }
  compare<fp16, fp16>(ex, {8, 16, 24}, activation::gelu_tanh, true, {.gap = 8});
  compare<fp16, float>(ex, {131, 3, 260}, activation::gelu_tanh,
                       true);                                  // several splits and blocks of columns
  compare<float, bf16>(ex, {5, 6, 7}, activation::none, true); // gradients in fewer bits
  for (auto const& where : {placement{}, {.offset = 3, .gap = 2}})
    for (auto const& s : {sizes{1, 1, 1}, {0, 3, 2}, {8, 16, 24}, {9, 11, 13}, {131, 3, 260}}) {
      compare_into<float, bf16>(ex, s, where);
      compare_into<float, fp16>(ex, s, where);
      compare_into<bf16, float>(ex, s, where);
    }
}

} // namespace

TEST_CASE("linear and its gradients on CUDA are those of float64") {
  exec::cuda ex;
  compare_all(ex);
}

#if defined(TESSERA_CUDA_EMULATION)
TEST_CASE("linear is right on a device whose products have no epilogues") {
  cuda_emulation::refuse_epilogues(true);
  exec::cuda ex;
  compare_all(ex);
  CHECK(ex.notes().size() == 1); // and says so once
  cuda_emulation::refuse_epilogues(false);
}

TEST_CASE("bias, GELU, its slope and the bias gradient are part of the product where addresses allow") {
  exec::cuda ex;
  index_t const m = 8, k = 16, n = 24;
  on_device<bf16, 2> in(ex, reference::normal<bf16, 2>({m, k}, 1)),
      weight(ex, reference::normal<bf16, 2>({n, k}, 2));
  on_device<bf16, 1> bias(ex, reference::normal<bf16, 1>({n}, 3));
  on_device<bf16, 2> out(ex, {m, n}), pre(ex, {m, n}), d_in(ex, {m, k});
  on_device<float, 2> d_weight(ex, {n, k});
  on_device<float, 1> d_bias(ex, {n});
  auto const fused = [&](auto call) {
    auto const products = cuda_emulation::products_started(), epilogues = cuda_emulation::epilogues_started();
    call();
    return std::pair(cuda_emulation::products_started() - products,
                     cuda_emulation::epilogues_started() - epilogues);
  };
  using count = std::pair<std::int64_t, std::int64_t>;
  CHECK(fused([&] { ops::linear(ex, out.view(), in.view(), weight, bias.view()); }) == count(1, 1));
  CHECK(fused([&] {
          ops::linear(ex, out.view(), in.view(), weight, bias.view(),
                      {.activation = activation::gelu_tanh, .pre_activation = pre});
        }) == count(1, 1));
  // An output in fp32 is the product's own; memory is taken for the bias in fp32, once.
  on_device<float, 2> out_fp32(ex, {m, n});
  CHECK(fused([&] { ops::linear(ex, out_fp32.view(), in.view(), weight, bias.view()); }) == count(1, 1));
  auto const allocations = ex.scratch().allocations();
  CHECK(fused([&] { ops::linear(ex, out_fp32.view(), in.view(), weight, bias.view()); }) == count(1, 1));
  CHECK(ex.scratch().allocations() == allocations);
  ops::linear_gradients<bf16, float, exec::cuda_memory> const gradients{d_in, d_weight, d_bias};
  // The weight's gradient with the bias's, and the input's with the slope of what made it.
  CHECK(fused([&] {
          ops::linear_backward(ex, gradients, out, in, weight,
                               {.input_activation = activation::gelu_tanh, .input_pre_activation = in});
        }) == count(2, 2));
  ex.synchronize();
}
#endif

TEST_CASE("rows and sums of none are legal: gradients are zero, outputs the bias") {
  exec::cuda ex;
  auto const bias = reference::normal<float, 1>({4}, 1);
  on_device<float, 1> b(ex, bias), d_bias(ex, reference::normal<float, 1>({4}, 2));
  on_device<float, 2> no_rows(ex, {0, 3}), weight(ex, {4, 3}), no_out(ex, {0, 4}),
      d_weight(ex, reference::normal<float, 2>({4, 3}, 3));
  ops::linear(ex, no_out.view(), no_rows.view(), weight, b.view());
  ops::linear_backward(ex, ops::linear_gradients<float, float, exec::cuda_memory>{no_rows, d_weight, d_bias},
                       no_out, no_rows, weight);
  CHECK(max_relative_error(d_bias.read(ex), std::vector<double>(4)) == 0);
  CHECK(max_relative_error(d_weight.read(ex), std::vector<double>(12)) == 0);

  on_device<float, 2> empty_in(ex, {2, 0}), empty_weight(ex, {4, 0}), out(ex, {2, 4});
  ops::linear(ex, out.view(), empty_in.view(), empty_weight, b.view());
  auto const got = out.read(ex);
  for (index_t j = 0; j < 4; ++j) CHECK(got(1, j) == bias(j));
}

TEST_CASE_TEMPLATE("the backward in two calls, each without what it does not read, is the backward in one", T,
                   float, bf16) {
  exec::cuda ex;
  using gradients = ops::linear_gradients<T, float, exec::cuda_memory>;
  for (auto form : {activation::none, activation::gelu_tanh, activation::gelu_erf})
    for (auto of_input : {activation::none, activation::gelu_tanh})
      for (auto accumulate : {false, true})
        for (auto const& [m, k, n] : {std::array<index_t, 3>{8, 16, 24}, {9, 11, 13}}) {
          on_device<T, 2> in(ex, reference::normal<T, 2>({m, k}, 1)),
              weight(ex, reference::normal<T, 2>({n, k}, 2)), d_out(ex, reference::normal<T, 2>({m, n}, 3)),
              pre(ex, reference::normal<T, 2>({m, n}, 4)), before(ex, reference::normal<T, 2>({m, k}, 5)),
              d_in(ex, {m, k}), d_in_alone(ex, {m, k}), d_pre(ex, {m, n});
          on_device<float, 2> d_weight(ex, {n, k}), d_weight_alone(ex, {n, k});
          on_device<float, 1> d_bias(ex, {n}), d_bias_alone(ex, {n});
          ops::linear_backward(ex, gradients{d_in, d_weight, d_bias}, d_out, in, weight,
                               {.accumulate = accumulate,
                                .activation = form,
                                .pre_activation = pre,
                                .input_activation = of_input,
                                .input_pre_activation = before});
          ops::linear_backward(ex, gradients{d_in_alone, {}, {}}, d_out, {}, weight,
                               {.activation = form,
                                .pre_activation = pre,
                                .input_activation = of_input,
                                .input_pre_activation = before,
                                .scratch = d_pre});
          ops::linear_backward(ex, gradients{{}, d_weight_alone, d_bias_alone},
                               form == activation::none ? d_out.view() : d_pre.view(), in, {},
                               {.accumulate = accumulate});
          CHECK(max_relative_error(d_in_alone.read(ex), doubles(d_in.read(ex).span())) == 0);
          CHECK(max_relative_error(d_weight_alone.read(ex), doubles(d_weight.read(ex).span())) < 1e-6);
          CHECK(max_relative_error(d_bias_alone.read(ex), doubles(d_bias.read(ex).span())) <
                reference::tolerance<T>());
        }
}

TEST_CASE("NaN passes through products, bias and GELU") {
  exec::cuda ex;
  for (auto form : {activation::none, activation::gelu_tanh, activation::gelu_erf}) {
    auto in = reference::normal<bf16, 2>({8, 8}, 1);
    in(3, 2) = bf16(NAN);
    on_device<bf16, 2> x(ex, in), weight(ex, reference::normal<bf16, 2>({8, 8}, 2)), out(ex, {8, 8});
    ops::linear(ex, out.view(), x.view(), weight, test::device_view<bf16, 1>(), {.activation = form});
    auto const got = out.read(ex);
    for (index_t j = 0; j < 8; ++j) {
      CHECK(std::isnan(static_cast<float>(got(3, j))));
      CHECK(!std::isnan(static_cast<float>(got(4, j))));
    }
  }
}

TEST_CASE("column sums are the same bits whatever the multiprocessors, and twice") {
  exec::cuda ex;
  on_device<bf16, 2> d_out(ex, reference::normal<bf16, 2>({300, 40}, 1)),
      in(ex, reference::normal<bf16, 2>({300, 8}, 2)), weight(ex, {40, 8}), d_in(ex, {300, 8});
  on_device<float, 1> first(ex, {40}), second(ex, {40});
  for (auto* bias : {&first, &second})
    ops::linear_backward(ex, ops::linear_gradients<bf16, float, exec::cuda_memory>{{}, {}, *bias}, d_out, in,
                         weight, {.accumulate = true});
  CHECK(max_relative_error(first.read(ex), doubles(second.read(ex).span())) == 0);
}

TEST_CASE("a gradient that is added to cannot be that before an activation") {
  exec::cuda ex;
  on_device<float, 2> x(ex, {2, 3}), w(ex, {4, 3}), dy(ex, {2, 4});
  auto const refused = test::error_of<config_error>([&] {
    ops::linear_backward(
        ex, ops::linear_gradients<float, float, exec::cuda_memory>{x, {}, {}}, dy, x, w,
        {.accumulate_input = true, .input_activation = activation::gelu_tanh, .input_pre_activation = x});
  });
  CHECK(refused.id == "E-ops-106");
}
