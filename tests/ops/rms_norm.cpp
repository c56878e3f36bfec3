#include <tessera/ops/rms_norm.hpp>

#include "fixture.hpp"

using namespace fixture;

namespace {

numbers exact_norm(numbers const& x, numbers const& gain, double epsilon) {
  double squares = 0;
  for (auto v : x) squares += v * v / static_cast<double>(x.size());
  numbers out(x.size());
  for (std::size_t i = 0; i < x.size(); ++i) out[i] = x[i] / std::sqrt(squares + epsilon) * gain[i];
  return out;
}

numbers row_of(numbers const& x, std::size_t row, std::size_t width) {
  auto const begin = x.begin() + static_cast<index_t>(row * width);
  return numbers(begin, begin + static_cast<index_t>(width));
}

} // namespace

TEST_CASE_TEMPLATE("rms_norm and its backward agree with double, with rows apart", P, types<float, float>,
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
    auto const epsilon = 1e-3f;
    auto const x = reference::normal<R, 2>({rows, width}, 1, 2.0f),
               dy = reference::normal<R, 2>({rows, width}, 2);
    auto const gain = reference::normal<T, 1>({width}, 3);
    apart<R> in(x), d_out(dy), d_in(x);
    apart<T> out(tensor<T, 2>(x.extents()));
    tensor<float, 1> deviation({rows});
    tensor<G, 1> d_gain({width});
    ops::rms_norm(ex, out.rows, deviation.view(), in.rows, gain, {.epsilon = epsilon});
    ops::rms_norm_backward(ex, d_in.rows, d_gain.view(), d_out.rows, in.rows, deviation, gain);

    auto const w = static_cast<std::size_t>(width);
    auto const xs = reference::doubles(x.span()), dys = reference::doubles(dy.span()),
               gains = reference::doubles(gain.span());
    numbers expected;
    for (std::size_t r = 0; w > 0 && r < xs.size() / w; ++r) {
      auto const row = exact_norm(row_of(xs, r, w), gains, epsilon);
      expected.insert(expected.end(), row.begin(), row.end());
    }
    auto const slope = reference::gradient_by_rows(xs, w, [&](numbers const& row, std::size_t r) {
      return reference::dot(exact_norm(row, gains, epsilon), row_of(dys, r, w));
    });
    CHECK(reference::max_relative_error(out.packed(), expected) < reference::tolerance<T>());
    CHECK(reference::max_relative_error(d_in.packed(), slope) < reference::tolerance<R>());
    if (rows * width <= 1200) {
      auto const gain_slope = reference::gradient(gains, [&](numbers const& g) {
        double loss = 0;
        for (std::size_t r = 0; w > 0 && r < xs.size() / w; ++r)
          loss += reference::dot(exact_norm(row_of(xs, r, w), g, epsilon), row_of(dys, r, w));
        return loss;
      });
      CHECK(reference::max_relative_error(d_gain, gain_slope) < reference::tolerance<G>());
    }
    CHECK(out.padding_is(77));
  }
}

TEST_CASE_TEMPLATE("residual_rms_norm is add, then rms_norm, bit for bit", P, types<float, float>,
                   types<bf16, bf16>, types<bf16, bf16, float>) {
  using T = typename P::T;
  using R = typename P::R;
  exec::host ex({.threads = 2});
  for (auto const size : shapes) {
    auto const rows = size.rows, width = size.width;
    auto a = reference::normal<R, 2>({rows, width}, 1), b = reference::normal<R, 2>({rows, width}, 2);
    auto const gain = reference::normal<T, 1>({width}, 3);
    tensor<R, 2> sum({rows, width}), expected_sum({rows, width});
    tensor<T, 2> out({rows, width}), expected({rows, width});
    tensor<float, 1> deviation({rows}), expected_deviation({rows});
    for (index_t i = 0; i < rows; ++i)
      for (index_t j = 0; j < width; ++j)
        expected_sum(i, j) = R(static_cast<float>(a(i, j)) + static_cast<float>(b(i, j)));
    ops::rms_norm(ex, expected.view(), expected_deviation.view(), expected_sum, gain);
    ops::residual_rms_norm(ex, out.view(), sum.view(), deviation.view(), a, b, gain);
    CHECK(bits(sum) == bits(expected_sum));
    CHECK(bits(out) == bits(expected));
    CHECK(bits(deviation) == bits(expected_deviation));
  }
}

TEST_CASE("rms_norm_backward adds where it is asked to") {
  exec::host ex({.threads = 2});
  auto const x = reference::normal<float, 2>({67, 17}, 1), dy = reference::normal<float, 2>({67, 17}, 2);
  auto const gain = reference::normal<float, 1>({17}, 3);
  tensor<float, 2> out({67, 17}), d_in({67, 17});
  tensor<float, 1> deviation({67}), d_gain({17});
  ops::rms_norm(ex, out.view(), deviation.view(), x, gain);
  ops::rms_norm_backward(ex, d_in.view(), d_gain.view(), dy, x, deviation, gain);
  auto const once = reference::doubles(d_in.span()), once_gain = reference::doubles(d_gain.span());
  ops::rms_norm_backward(ex, d_in.view(), d_gain.view(), dy, x, deviation, gain,
                         {.accumulate = true, .accumulate_input = true});
  for (std::size_t i = 0; i < once.size(); ++i) CHECK(d_in.span()[i] == doctest::Approx(2 * once[i]));
  for (std::size_t i = 0; i < once_gain.size(); ++i)
    CHECK(d_gain.span()[i] == doctest::Approx(2 * once_gain[i]));
}

TEST_CASE_TEMPLATE("rms_norm gives the same bits for any number of threads", R, bf16, float) {
  auto const x = reference::normal<R, 2>({1009, 131}, 1), dy = reference::normal<R, 2>({1009, 131}, 2);
  auto const gain = reference::normal<bf16, 1>({131}, 3);
  same_bits_for_any_thread_count([&](exec::host& ex) {
    tensor<bf16, 2> out({1009, 131});
    tensor<R, 2> d_in({1009, 131});
    tensor<float, 1> deviation({1009}), d_gain({131});
    ops::rms_norm(ex, out.view(), deviation.view(), x, gain);
    ops::rms_norm_backward(ex, d_in.view(), d_gain.view(), dy, x, deviation, gain);
    return bits(out) + bits(d_in) + bits(deviation) + bits(d_gain);
  });
}

TEST_CASE("rms_norm names the argument that does not fit") {
  exec::host ex({.threads = 1});
  tensor<float, 2> x({2, 3});
  tensor<float, 1> two({2}), three({3});
  CHECK(test::error_of<size_error>([&] { ops::rms_norm(ex, x.view(), two.view(), x, two); }).says("gain"));
  CHECK(test::error_of<size_error>([&] { ops::rms_norm(ex, x.view(), three.view(), x, three); }).id ==
        "E-ops-001");
}
