#include <tessera/ops/cuda/layer_norm.cuh>

#include "ops/cuda/norm_fixture.hpp"

using namespace cuda_fixture;

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

/// The gradients by the chain rule in double.
norm_gradients exact_gradients(numbers const& x, numbers const& dy, numbers const& gain, double epsilon) {
  auto const width = static_cast<double>(x.size());
  double mean = 0, variance = 0, h_mean = 0, hn_mean = 0;
  for (auto v : x) mean += v / width;
  for (auto v : x) variance += (v - mean) * (v - mean) / width;
  auto const r = 1 / std::sqrt(variance + epsilon);
  for (std::size_t i = 0; i < x.size(); ++i) {
    h_mean += dy[i] * gain[i] / width;
    hn_mean += dy[i] * gain[i] * (x[i] - mean) * r / width;
  }
  norm_gradients g;
  for (std::size_t i = 0; i < x.size(); ++i) {
    auto const n = (x[i] - mean) * r;
    g.input.push_back((dy[i] * gain[i] - h_mean - n * hn_mean) * r);
    g.gain.push_back(dy[i] * n);
    g.bias.push_back(dy[i]);
  }
  return g;
}

/// Forward and backward of rows x width, compared with double and with the host.
template <class T, class G, class R = T>
void check(index_t rows, index_t width, lying how) {
  CAPTURE(rows);
  CAPTURE(width);
  exec::cuda ex;
  exec::host host({.threads = 1});
  auto const epsilon = 1e-3f; // so that a wrong place for it shows
  norm_problem<T, R> const p(rows, width);
  device_rows<R> in(ex, p.x, how, 0), d_out(ex, p.dy, how, 1), d_in(ex, how, 5, rows, width);
  device_rows<T> gain(ex, p.gain, how, 2), bias(ex, p.bias, how, 3), out(ex, how, 4, rows, width);
  device_rows<float> mean(ex, how, 0, 1, rows), deviation(ex, how, 1, 1, rows);
  device_rows<G> d_gain(ex, how, 2, 1, width), d_bias(ex, how, 3, 1, width);
  ops::layer_norm(ex, out.rows(), mean.flat(), deviation.flat(), in.rows(), gain.flat(), bias.flat(),
                  {.epsilon = epsilon});
  ops::layer_norm_backward(ex, d_in.rows(), d_gain.flat(), d_bias.flat(), d_out.rows(), in.rows(),
                           mean.flat(), deviation.flat(), gain.flat());

  tensor<T, 2> host_out({rows, width});
  tensor<R, 2> host_d_in({rows, width});
  tensor<float, 1> host_mean({rows}), host_deviation({rows});
  tensor<G, 1> host_d_gain({width}), host_d_bias({width});
  ops::layer_norm(host, host_out.view(), host_mean.view(), host_deviation.view(), p.x, p.gain, p.bias,
                  {.epsilon = epsilon});
  ops::layer_norm_backward(host, host_d_in.view(), host_d_gain.view(), host_d_bias.view(), p.dy, p.x,
                           host_mean, host_deviation, p.gain);

  numbers expected, slope, gains(static_cast<std::size_t>(width)), biases(gains.size());
  for (index_t r = 0; r < rows; ++r) {
    auto const x = part(p.xs, r, width), dy = part(p.dys, r, width);
    append(expected, exact_norm(x, p.gains, p.biases, epsilon));
    auto const g = exact_gradients(x, dy, p.gains, epsilon);
    append(slope, g.input);
    for (std::size_t i = 0; i < gains.size(); ++i) gains[i] += g.gain[i], biases[i] += g.bias[i];
  }
  CHECK(agree<T>(out.read(ex), expected, host_out));
  if (width == 1) // the input has no effect; what is left is rounding
    for (auto v : reference::doubles(d_in.read(ex).span())) CHECK(std::fabs(v) < 1e-4);
  else
    CHECK(agree<R>(d_in.read(ex), slope, host_d_in));
  CHECK(agree<G>(d_gain.read(ex), gains, host_d_gain));
  CHECK(agree<G>(d_bias.read(ex), biases, host_d_bias));
  ops::layer_norm_backward(ex, d_in.rows(), d_gain.flat(), d_bias.flat(), d_out.rows(), in.rows(),
                           mean.flat(), deviation.flat(), gain.flat(),
                           {.accumulate = true, .accumulate_input = true});
  if (width > 1)
    CHECK(reference::max_relative_error(d_in.read(ex), twice(slope)) < 2 * reference::tolerance<R>());
  CHECK(reference::max_relative_error(d_gain.read(ex), twice(gains)) < 2 * reference::tolerance<G>());
  CHECK(reference::max_relative_error(mean.read(ex), reference::doubles(host_mean.span())) < 1e-5);
  CHECK(reference::max_relative_error(deviation.read(ex), reference::doubles(host_deviation.span())) < 1e-5);
}

} // namespace

TEST_CASE_TEMPLATE("layer_norm and its backward agree with double and with the host, wherever rows lie", P,
                   types<float, float>, types<bf16, bf16>, types<bf16, float>, types<fp16, float>,
                   types<bf16, float, float>, types<fp16, fp16, float>) {
  for (auto [rows, width] : norm_shapes)
    for (auto how : lyings) check<typename P::T, typename P::G, typename P::R>(rows, width, how);
}

TEST_CASE("layer_norm of rows that do not fit a group's registers") {
  check<bf16, float>(2, 8192 + 8, lying::aligned);  // in the backward
  check<float, float>(2, 16384 + 21, lying::apart); // in both
  check<bf16, float, float>(2, 16384 + 24, lying::aligned);
}

TEST_CASE("layer_norm_backward of more rows than there are blocks for") {
  check<float, float>(256 * 8 * 2 + 3, 5, lying::aligned);
}

TEST_CASE_TEMPLATE("residual_layer_norm is add, then layer_norm, bit for bit", P, types<float, float>,
                   types<bf16, bf16>, types<bf16, bf16, float>) {
  using T = typename P::T;
  using R = typename P::R;
  exec::cuda ex;
  for (auto [rows, width] : {fixture::shape{7, 129}, {2, 1024}, {1, 16384 + 21}})
    for (auto how : {lying::aligned, lying::apart}) {
      norm_problem<T, R> const p(rows, width);
      tensor<R, 2> added({rows, width});
      for (index_t i = 0; i < rows * width; ++i)
        added.data()[i] = R(static_cast<float>(p.x.data()[i]) + static_cast<float>(p.dy.data()[i]));
      device_rows<R> a(ex, p.x, how, 0), b(ex, p.dy, how, 1), sum(ex, how, 5, rows, width),
          plain(ex, added, how, 0);
      device_rows<T> gain(ex, p.gain, how, 2), bias(ex, p.bias, how, 3), out(ex, how, 4, rows, width),
          expected(ex, how, 4, rows, width);
      device_rows<float> mean(ex, how, 0, 1, rows), deviation(ex, how, 1, 1, rows),
          other(ex, how, 0, 1, rows), another(ex, how, 1, 1, rows);
      ops::layer_norm(ex, expected.rows(), other.flat(), another.flat(), plain.rows(), gain.flat(),
                      bias.flat());
      ops::residual_layer_norm(ex, out.rows(), sum.rows(), mean.flat(), deviation.flat(), a.rows(), b.rows(),
                               gain.flat(), bias.flat());
      CHECK(bits(sum.read(ex)) == bits(added));
      CHECK(bits(out.read(ex)) == bits(expected.read(ex)));
      CHECK(bits(mean.read(ex)) == bits(other.read(ex)));
      CHECK(bits(deviation.read(ex)) == bits(another.read(ex)));
      // The sum over one of its summands.
      ops::residual_layer_norm(ex, out.rows(), b.rows(), mean.flat(), deviation.flat(), a.rows(), b.rows(),
                               gain.flat(), bias.flat());
      CHECK(bits(b.read(ex)) == bits(added));
      CHECK(bits(out.read(ex)) == bits(expected.read(ex)));
    }
}

TEST_CASE_TEMPLATE("layer_norm_backward adds where it is asked to, and works in place", G, float, bf16) {
  exec::cuda ex;
  norm_problem<float> const p(67, 17);
  auto const how = lying::shifted;
  tensor<float, 2> tens({67, 17});
  for (auto& v : tens.span()) v = 10;
  tensor<G, 1> ones({17});
  for (auto& v : ones.span()) v = G(1.0f);
  device_rows<float> in(ex, p.x, how, 0), d_out(ex, p.dy, how, 1), gain(ex, p.gain, how, 2),
      bias(ex, p.bias, how, 3), out(ex, how, 4, 67, 17), plain(ex, how, 5, 67, 17), added(ex, tens, how, 6);
  device_rows<float> mean(ex, how, 0, 1, 67), deviation(ex, how, 1, 1, 67);
  device_rows<G> d_gain(ex, how, 2, 1, 17), d_bias(ex, how, 3, 1, 17), more_gain(ex, ones, how, 4),
      more_bias(ex, ones, how, 5);
  ops::layer_norm(ex, out.rows(), mean.flat(), deviation.flat(), in.rows(), gain.flat(), bias.flat());
  ops::layer_norm_backward(ex, plain.rows(), d_gain.flat(), d_bias.flat(), d_out.rows(), in.rows(),
                           mean.flat(), deviation.flat(), gain.flat());
  ops::layer_norm_backward(ex, added.rows(), more_gain.flat(), more_bias.flat(), d_out.rows(), in.rows(),
                           mean.flat(), deviation.flat(), gain.flat(),
                           {.accumulate = true, .accumulate_input = true});
  auto const once = plain.read(ex), twice = added.read(ex);
  for (index_t i = 0; i < once.size(); ++i)
    CHECK(twice.data()[i] == doctest::Approx(10 + once.data()[i]).epsilon(1e-6));
  auto const gains = d_gain.read(ex), biases = d_bias.read(ex), gains_more = more_gain.read(ex),
             biases_more = more_bias.read(ex);
  for (index_t i = 0; i < 17; ++i) {
    CHECK(static_cast<float>(gains_more(0, i)) ==
          doctest::Approx(1 + static_cast<float>(gains(0, i))).epsilon(0.01));
    CHECK(static_cast<float>(biases_more(0, i)) ==
          doctest::Approx(1 + static_cast<float>(biases(0, i))).epsilon(0.01));
  }
  ops::layer_norm_backward(ex, d_out.rows(), d_gain.flat(), d_bias.flat(), d_out.rows(), in.rows(),
                           mean.flat(), deviation.flat(), gain.flat());
  CHECK(bits(d_out.read(ex)) == bits(once));
}

TEST_CASE("layer_norm_backward gives the same bits on every run") {
  exec::cuda ex;
  norm_problem<bf16> const p(1009, 131);
  auto const how = lying::shifted;
  device_rows<bf16> in(ex, p.x, how, 0), d_out(ex, p.dy, how, 1), gain(ex, p.gain, how, 2),
      d_in(ex, how, 5, 1009, 131);
  auto const mean = reference::normal<float, 1>({1009}, 5),
             deviation = reference::normal<float, 1>({1009}, 6);
  device_rows<float> means(ex, mean, how, 0), deviations(ex, deviation, how, 1), d_gain(ex, how, 2, 1, 131),
      d_bias(ex, how, 3, 1, 131);
  std::string first;
  for (int run = 0; run < 3; ++run) {
    ops::layer_norm_backward(ex, d_in.rows(), d_gain.flat(), d_bias.flat(), d_out.rows(), in.rows(),
                             means.flat(), deviations.flat(), gain.flat());
    auto const result = bits(d_in.read(ex)) + bits(d_gain.read(ex)) + bits(d_bias.read(ex));
    if (run == 0) first = result;
    CHECK(result == first);
  }
}

TEST_CASE("layer_norm of a constant row far from zero is the bias: no cancellation") {
  exec::cuda ex;
  tensor<float, 2> x({1, 1021});
  tensor<float, 1> ones({1021}), halves({1021});
  for (auto& v : x.span()) v = 1024;
  for (auto& v : ones.span()) v = 1;
  for (auto& v : halves.span()) v = 0.5f;
  device_rows<float> in(ex, x, lying::aligned, 0), gain(ex, ones, lying::aligned, 1),
      bias(ex, halves, lying::aligned, 2), out(ex, lying::aligned, 3, 1, 1021),
      mean(ex, lying::aligned, 4, 1, 1), deviation(ex, lying::aligned, 5, 1, 1);
  ops::layer_norm(ex, out.rows(), mean.flat(), deviation.flat(), in.rows(), gain.flat(), bias.flat());
  auto const y = out.read(ex);
  for (auto v : y.span()) CHECK(v == doctest::Approx(0.5).epsilon(0.02));
}
