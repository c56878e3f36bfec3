#include <tessera/ops/elementary.hpp>

#include <tessera/exec/elements.cuh>

#include "ops/cuda/fixture.hpp"

using namespace cuda_fixture;

// Named: what a kernel is made from must have a name outside of its file.
namespace elementary_test {

struct exp {
  TESSERA_HOST_DEVICE void operator()(float& y, float x) const noexcept { y = ops::elementary::exp(x); }
};
struct log {
  TESSERA_HOST_DEVICE void operator()(float& y, float x) const noexcept { y = ops::elementary::log(x); }
};
struct tanh {
  TESSERA_HOST_DEVICE void operator()(float& y, float x) const noexcept { y = ops::elementary::tanh(x); }
};
struct erf {
  TESSERA_HOST_DEVICE void operator()(float& y, float x) const noexcept { y = ops::elementary::erf(x); }
};
struct sigmoid {
  TESSERA_HOST_DEVICE void operator()(float& y, float x) const noexcept { y = ops::elementary::sigmoid(x); }
};

} // namespace elementary_test

namespace {

template <class Function>
tensor<float, 2> values(tensor<float, 1> const& x) {
  exec::cuda ex;
  device_rows<float> in(ex, x, lying::aligned, 0), out(ex, lying::aligned, 1, 1, x.size());
  exec::for_elements(ex, x.size(), Function{}, exec::writes(out.flat().data()),
                     exec::reads(in.flat().data()));
  return out.read(ex);
}

/// The largest error over [from, to], in units in the last place of the exact value (of the smallest normal
/// number where that is smaller).
template <class Function>
double worst_error(double from, double to, double (*exact)(double)) {
  index_t const n = 20011;
  tensor<float, 1> x({n});
  for (index_t i = 0; i < n; ++i)
    x(i) = static_cast<float>(from + (to - from) * static_cast<double>(i) / static_cast<double>(n - 1));
  auto const y = values<Function>(x);
  double worst = 0;
  for (index_t i = 0; i < n; ++i) {
    auto const expected = exact(static_cast<double>(x(i)));
    auto const size = std::fmax(std::fabs(expected), 0x1p-126);
    auto const unit = std::ldexp(1.0, std::ilogb(size) - 23);
    auto const error = std::fabs(static_cast<double>(y(0, i)) - expected) / unit;
    if (!(error <= worst)) worst = error == error ? error : INFINITY;
  }
  return worst;
}

template <class Function>
float value(float x) {
  tensor<float, 1> one({1});
  one(0) = x;
  return values<Function>(one)(0, 0);
}

} // namespace

TEST_CASE("elementary functions keep their accuracy in device code") {
  namespace f = elementary_test;
  CHECK(worst_error<f::exp>(-87, 88, [](double x) { return std::exp(x); }) < 2);
  CHECK(worst_error<f::log>(0.001, 4, [](double x) { return std::log(x); }) < 2);
  CHECK(worst_error<f::log>(1e-30, 1e30, [](double x) { return std::log(x); }) < 2);
  CHECK(worst_error<f::tanh>(-10, 10, [](double x) { return std::tanh(x); }) < 2.5);
  CHECK(worst_error<f::erf>(-5, 5, [](double x) { return std::erf(x); }) < 2.5);
  auto const exact_sigmoid = [](double x) { return 1 / (1 + std::exp(-x)); };
  CHECK(worst_error<f::sigmoid>(0, 80, exact_sigmoid) < 4);
  CHECK(worst_error<f::sigmoid>(-80, 0, exact_sigmoid) < 1e-5 * 0x1p23);
}

TEST_CASE("elementary functions keep their limits in device code") {
  namespace f = elementary_test;
  CHECK(value<f::exp>(-INFINITY) == 0);
  CHECK(value<f::exp>(INFINITY) == INFINITY);
  CHECK(std::isnan(value<f::exp>(NAN)));
  CHECK(value<f::log>(0.0f) == -INFINITY);
  CHECK(value<f::log>(INFINITY) == INFINITY);
  CHECK(std::isnan(value<f::log>(-1.0f)));
  CHECK(value<f::tanh>(INFINITY) == 1);
  CHECK(value<f::erf>(-INFINITY) == -1);
  CHECK(value<f::sigmoid>(INFINITY) == 1);
  CHECK(value<f::sigmoid>(-INFINITY) == 0);
  CHECK(std::isnan(value<f::sigmoid>(NAN)));
}
