#include <tessera/ops/layer_norm.hpp>

#include "fixture.hpp"

using namespace fixture;

namespace {

numbers exact_norm(numbers const& x, numbers const& gain, numbers const& bias, double epsilon) {
  double mean = 0, variance = 0;
  for (auto v : x) mean += v / static_cast<double>(x.size());
  for (auto v : x) variance += (v - mean) * (v - mean) / static_cast<double>(x.size());
  numbers out(x.size());
  for (std::size_t i = 0; i < x.size(); ++i)
    out[i] = (x[i] - mean) / std::sqrt(variance + epsilon) * gain[i] + bias[i];
  return out;
}

numbers row_of(numbers const& x, std::size_t row, std::size_t width) {
  auto const begin = x.begin() + static_cast<index_t>(row * width);
  return numbers(begin, begin + static_cast<index_t>(width));
}

} // namespace

TEST_CASE_TEMPLATE("layer_norm and its backward agree with double, with rows apart", P, types<float, float>,
                   types<bf16, bf16>, types<bf16, float>, types<fp16, float>, types<bf16, bf16, float>,
                   types<bf16, float, float>, types<fp16, float, float>) {
  using T = typename P::T;
  using G = typename P::G;
  using R = typename P::R;
  exec::host ex({.threads = 2});
  for (auto const size : shapes) {
    auto const rows = size.rows, width = size.width;
    CAPTURE(rows);
    CAPTURE(width);
    auto const epsilon = 1e-3f; // so that a wrong place for it shows
    auto const x = reference::normal<R, 2>({rows, width}, 1, 2.0f),
               dy = reference::normal<R, 2>({rows, width}, 2);
    auto const gain = reference::normal<T, 1>({width}, 3), bias = reference::normal<T, 1>({width}, 4);
    apart<R> in(x), d_out(dy), d_in(x);
    apart<T> out(tensor<T, 2>(x.extents()));
    tensor<float, 1> mean({rows}), deviation({rows});
    tensor<G, 1> d_gain({width}), d_bias({width});
    for (auto& g : d_gain.span()) g = G(NAN); // overwritten, not added to
    ops::layer_norm(ex, out.rows, mean.view(), deviation.view(), in.rows, gain, bias, {.epsilon = epsilon});
    ops::layer_norm_backward(ex, d_in.rows, d_gain.view(), d_bias.view(), d_out.rows, in.rows, mean,
                             deviation, gain);

    auto const w = static_cast<std::size_t>(width);
    auto const xs = reference::doubles(x.span()), dys = reference::doubles(dy.span()),
               gains = reference::doubles(gain.span()), biases = reference::doubles(bias.span());
    numbers expected;
    for (std::size_t r = 0; w > 0 && r < xs.size() / w; ++r) {
      auto const row = exact_norm(row_of(xs, r, w), gains, biases, epsilon);
      expected.insert(expected.end(), row.begin(), row.end());
    }
    auto const slope = reference::gradient_by_rows(xs, w, [&](numbers const& row, std::size_t r) {
      return reference::dot(exact_norm(row, gains, biases, epsilon), row_of(dys, r, w));
    });
    auto const parameter_loss = [&](numbers const& g, numbers const& b) {
      double loss = 0;
      for (std::size_t r = 0; w > 0 && r < xs.size() / w; ++r)
        loss += reference::dot(exact_norm(row_of(xs, r, w), g, b, epsilon), row_of(dys, r, w));
      return loss;
    };
    CHECK(reference::max_relative_error(out.packed(), expected) < reference::tolerance<T>());
    if (width == 1) // the input has no effect; what is left is rounding
      for (auto v : reference::doubles(d_in.packed().span())) CHECK(std::fabs(v) < 1e-4);
    else
      CHECK(reference::max_relative_error(d_in.packed(), slope) < reference::tolerance<R>());
    if (rows * width <= 1200) {
      CHECK(reference::max_relative_error(d_gain, reference::gradient(gains, [&](numbers const& g) {
                                            return parameter_loss(g, biases);
                                          })) < reference::tolerance<G>());
      CHECK(reference::max_relative_error(d_bias, reference::gradient(biases, [&](numbers const& b) {
                                            return parameter_loss(gains, b);
                                          })) < reference::tolerance<G>());
    }
    CHECK(out.padding_is(77));
    CHECK(d_in.padding_is(77));
  }
}

TEST_CASE_TEMPLATE("residual_layer_norm is add, then layer_norm, bit for bit", P, types<float, float>,
                   types<bf16, bf16>, types<bf16, bf16, float>) {
  using T = typename P::T;
  using R = typename P::R;
  exec::host ex({.threads = 2});
  for (auto const size : shapes) {
    auto const rows = size.rows, width = size.width;
    auto a = reference::normal<R, 2>({rows, width}, 1), b = reference::normal<R, 2>({rows, width}, 2);
    auto const gain = reference::normal<T, 1>({width}, 3), bias = reference::normal<T, 1>({width}, 4);
    tensor<R, 2> sum({rows, width}), expected_sum({rows, width});
    tensor<T, 2> out({rows, width}), expected({rows, width});
    tensor<float, 1> mean({rows}), deviation({rows}), expected_mean({rows}), expected_deviation({rows});
    for (index_t i = 0; i < rows; ++i)
      for (index_t j = 0; j < width; ++j)
        expected_sum(i, j) = R(static_cast<float>(a(i, j)) + static_cast<float>(b(i, j)));
    ops::layer_norm(ex, expected.view(), expected_mean.view(), expected_deviation.view(), expected_sum, gain,
                    bias);
    ops::residual_layer_norm(ex, out.view(), sum.view(), mean.view(), deviation.view(), a, b, gain, bias);
    CHECK(bits(sum) == bits(expected_sum));
    CHECK(bits(out) == bits(expected));
    CHECK(bits(mean) == bits(expected_mean));
    CHECK(bits(deviation) == bits(expected_deviation));
    ops::residual_layer_norm(ex, out.view(), b.view(), mean.view(), deviation.view(), a, b, gain, bias);
    CHECK(bits(b) == bits(expected_sum)); // the sum over one of its summands
  }
}

TEST_CASE_TEMPLATE("layer_norm_backward adds where it is asked to, and works in place", G, float, bf16) {
  exec::host ex({.threads = 2});
  auto const x = reference::normal<float, 2>({67, 17}, 1);
  auto const gain = reference::normal<float, 1>({17}, 3), bias = reference::normal<float, 1>({17}, 4);
  auto dy = reference::normal<float, 2>({67, 17}, 2);
  tensor<float, 2> out({67, 17}), plain({67, 17}), added({67, 17});
  tensor<float, 1> mean({67}), deviation({67});
  tensor<G, 1> d_gain({17}), d_bias({17}), more_gain({17}), more_bias({17});
  ops::layer_norm(ex, out.view(), mean.view(), deviation.view(), x, gain, bias);
  ops::layer_norm_backward(ex, plain.view(), d_gain.view(), d_bias.view(), dy, x, mean, deviation, gain);
  for (auto& v : added.span()) v = 10;
  for (index_t i = 0; i < 17; ++i) more_gain(i) = more_bias(i) = G(1.0f);
  ops::layer_norm_backward(ex, added.view(), more_gain.view(), more_bias.view(), dy, x, mean, deviation, gain,
                           {.accumulate = true, .accumulate_input = true});
  for (index_t i = 0; i < added.size(); ++i)
    CHECK(added.data()[i] == doctest::Approx(10 + plain.data()[i]).epsilon(1e-6));
  for (index_t i = 0; i < 17; ++i) {
    CHECK(static_cast<float>(more_gain(i)) ==
          doctest::Approx(1 + static_cast<float>(d_gain(i))).epsilon(0.01));
    CHECK(static_cast<float>(more_bias(i)) ==
          doctest::Approx(1 + static_cast<float>(d_bias(i))).epsilon(0.01));
  }
  ops::layer_norm_backward(ex, dy.view(), d_gain.view(), d_bias.view(), dy, x, mean, deviation, gain);
  CHECK(bits(dy) == bits(plain));
}

TEST_CASE("layer_norm of a constant row far from zero is the bias: no cancellation") {
  exec::host ex({.threads = 1});
  tensor<float, 2> x({1, 1021}), out({1, 1021});
  tensor<float, 1> mean({1}), deviation({1}), gain({1021}), bias({1021});
  for (auto& v : x.span()) v = 1024;
  for (auto& v : gain.span()) v = 1;
  for (auto& v : bias.span()) v = 0.5f;
  ops::layer_norm(ex, out.view(), mean.view(), deviation.view(), x, gain, bias);
  for (auto v : out.span()) CHECK(v == doctest::Approx(0.5).epsilon(0.02));
}

TEST_CASE_TEMPLATE("layer_norm gives the same bits for any number of threads", P, types<float, float>,
                   types<bf16, bf16>, types<bf16, float, float>) {
  using T = typename P::T;
  using R = typename P::R;
  auto const x = reference::normal<R, 2>({1009, 131}, 1), dy = reference::normal<R, 2>({1009, 131}, 2);
  auto const gain = reference::normal<T, 1>({131}, 3), bias = reference::normal<T, 1>({131}, 4);
  same_bits_for_any_thread_count([&](exec::host& ex) {
    tensor<T, 2> out({1009, 131});
    tensor<R, 2> d_in({1009, 131});
    tensor<float, 1> mean({1009}), deviation({1009}), d_gain({131}), d_bias({131});
    ops::layer_norm(ex, out.view(), mean.view(), deviation.view(), x, gain, bias);
    ops::layer_norm_backward(ex, d_in.view(), d_gain.view(), d_bias.view(), dy, x, mean, deviation, gain);
    return bits(out) + bits(d_in) + bits(mean) + bits(deviation) + bits(d_gain) + bits(d_bias);
  });
}

TEST_CASE("layer_norm names the argument that does not fit") {
  exec::host ex({.threads = 1});
  tensor<float, 2> x({2, 3}), other({3, 2});
  tensor<float, 1> two({2}), three({3});
  auto const v = [](auto& t) { return t.view(); };
  CHECK(test::error_of<size_error>([&] {
          ops::layer_norm(ex, v(x), v(two), v(two), x, two, three);
        }).says("layer_norm: gain has extents [2], expected [3]"));
  CHECK(test::error_of<size_error>([&] {
          ops::layer_norm(ex, v(other), v(two), v(two), x, three, three);
        }).id == "E-ops-001");
  CHECK(test::error_of<size_error>([&] {
          ops::residual_layer_norm(ex, v(x), v(x), v(two), v(two), x, other, three, three);
        }).says(": b has"));
  CHECK(test::error_of<size_error>([&] {
          ops::layer_norm_backward(ex, v(x), v(three), v(two), x, x, two, two, three);
        }).says("d_bias"));
}
