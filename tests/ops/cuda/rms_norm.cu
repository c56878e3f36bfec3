#include <tessera/ops/cuda/rms_norm.cuh>

#include "ops/cuda/norm_fixture.hpp"

using namespace cuda_fixture;

namespace {

double reciprocal(numbers const& x, double epsilon) {
  double squares = 0;
  for (auto v : x) squares += v * v / static_cast<double>(x.size());
  return 1 / std::sqrt(squares + epsilon);
}

numbers exact_norm(numbers const& x, numbers const& gain, double epsilon) {
  auto const r = reciprocal(x, epsilon);
  numbers out(x.size());
  for (std::size_t i = 0; i < x.size(); ++i) out[i] = x[i] * r * gain[i];
  return out;
}

norm_gradients exact_gradients(numbers const& x, numbers const& dy, numbers const& gain, double epsilon) {
  auto const r = reciprocal(x, epsilon);
  double hn_mean = 0;
  for (std::size_t i = 0; i < x.size(); ++i)
    hn_mean += dy[i] * gain[i] * x[i] * r / static_cast<double>(x.size());
  norm_gradients g;
  for (std::size_t i = 0; i < x.size(); ++i) {
    g.input.push_back((dy[i] * gain[i] - x[i] * r * hn_mean) * r);
    g.gain.push_back(dy[i] * x[i] * r);
  }
  return g;
}

template <class T, class G, class R = T>
void check(index_t rows, index_t width, lying how) {
  CAPTURE(rows);
  CAPTURE(width);
  exec::cuda ex;
  exec::host host({.threads = 1});
  auto const epsilon = 1e-3f;
  norm_problem<T, R> const p(rows, width);
  device_rows<R> in(ex, p.x, how, 0), d_out(ex, p.dy, how, 1), d_in(ex, how, 5, rows, width);
  device_rows<T> gain(ex, p.gain, how, 2), out(ex, how, 4, rows, width);
  device_rows<float> deviation(ex, how, 1, 1, rows);
  device_rows<G> d_gain(ex, how, 2, 1, width);
  ops::rms_norm(ex, out.rows(), deviation.flat(), in.rows(), gain.flat(), {.epsilon = epsilon});
  ops::rms_norm_backward(ex, d_in.rows(), d_gain.flat(), d_out.rows(), in.rows(), deviation.flat(),
                         gain.flat());

  tensor<T, 2> host_out({rows, width});
  tensor<R, 2> host_d_in({rows, width});
  tensor<float, 1> host_deviation({rows});
  tensor<G, 1> host_d_gain({width});
  ops::rms_norm(host, host_out.view(), host_deviation.view(), p.x, p.gain, {.epsilon = epsilon});
  ops::rms_norm_backward(host, host_d_in.view(), host_d_gain.view(), p.dy, p.x, host_deviation, p.gain);

  numbers expected, slope, gains(static_cast<std::size_t>(width));
  for (index_t r = 0; r < rows; ++r) {
    auto const x = part(p.xs, r, width), dy = part(p.dys, r, width);
    append(expected, exact_norm(x, p.gains, epsilon));
    auto const g = exact_gradients(x, dy, p.gains, epsilon);
    append(slope, g.input);
    for (std::size_t i = 0; i < gains.size(); ++i) gains[i] += g.gain[i];
  }
  CHECK(agree<T>(out.read(ex), expected, host_out));
  CHECK(agree<R>(d_in.read(ex), slope, host_d_in));
  CHECK(agree<G>(d_gain.read(ex), gains, host_d_gain));
  ops::rms_norm_backward(ex, d_in.rows(), d_gain.flat(), d_out.rows(), in.rows(), deviation.flat(),
                         gain.flat(), {.accumulate = true, .accumulate_input = true});
  CHECK(reference::max_relative_error(d_in.read(ex), twice(slope)) < 2 * reference::tolerance<R>());
  CHECK(reference::max_relative_error(d_gain.read(ex), twice(gains)) < 2 * reference::tolerance<G>());
  CHECK(reference::max_relative_error(deviation.read(ex), reference::doubles(host_deviation.span())) < 1e-5);
}

} // namespace

TEST_CASE_TEMPLATE("rms_norm and its backward agree with double and with the host, wherever rows lie", P,
                   types<float, float>, types<bf16, bf16>, types<bf16, float>, types<fp16, float>,
                   types<bf16, float, float>, types<fp16, fp16, float>) {
  for (auto [rows, width] : norm_shapes)
    for (auto how : lyings) check<typename P::T, typename P::G, typename P::R>(rows, width, how);
}

TEST_CASE("rms_norm of rows that do not fit a group's registers") {
  check<bf16, float>(2, 8192 + 8, lying::aligned);
  check<float, float>(2, 16384 + 21, lying::apart);
  check<bf16, float, float>(2, 16384 + 24, lying::aligned);
}

TEST_CASE_TEMPLATE("residual_rms_norm is add, then rms_norm, bit for bit", P, types<float, float>,
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
      device_rows<T> gain(ex, p.gain, how, 2), out(ex, how, 4, rows, width),
          expected(ex, how, 4, rows, width);
      device_rows<float> deviation(ex, how, 1, 1, rows), other(ex, how, 1, 1, rows);
      ops::rms_norm(ex, expected.rows(), other.flat(), plain.rows(), gain.flat());
      ops::residual_rms_norm(ex, out.rows(), sum.rows(), deviation.flat(), a.rows(), b.rows(), gain.flat());
      CHECK(bits(sum.read(ex)) == bits(added));
      CHECK(bits(out.read(ex)) == bits(expected.read(ex)));
      CHECK(bits(deviation.read(ex)) == bits(other.read(ex)));
      ops::residual_rms_norm(ex, out.rows(), b.rows(), deviation.flat(), a.rows(), b.rows(), gain.flat());
      CHECK(bits(b.read(ex)) == bits(added));
      CHECK(bits(out.read(ex)) == bits(expected.read(ex)));
    }
}
