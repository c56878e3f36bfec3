#include <tessera/ops/cuda/gelu.cuh>

#include "ops/cuda/fixture.hpp"

using namespace cuda_fixture;

namespace {

double exact_gelu(double x, ops::gelu_form form) {
  auto const pi = std::acos(-1.0);
  return form == ops::gelu_form::tanh
             ? 0.5 * x * (1 + std::tanh(std::sqrt(2 / pi) * (x + 0.044715 * x * x * x)))
             : 0.5 * x * (1 + std::erf(x / std::sqrt(2.0)));
}

} // namespace

// [doc: gelu on cuda]
TEST_CASE_TEMPLATE("gelu and its backward agree with double and with the host, wherever arrays lie", T, float,
                   bf16, fp16) {
  exec::cuda ex;
  exec::host host({.threads = 1});
  for (auto form : {ops::gelu_form::tanh, ops::gelu_form::erf})
    for (auto n : counts)
      for (auto how : lyings) {
        CAPTURE(n);
        auto const x = reference::normal<T, 1>({n}, 1, 2.0f), dy = reference::normal<T, 1>({n}, 2);
        device_rows<T> in(ex, x, how, 0), d_out(ex, dy, how, 1), out(ex, how, 2, 1, n),
            d_in(ex, how, 3, 1, n);
        ops::gelu(ex, out.flat(), in.flat(), {.form = form});
        ops::gelu_backward(ex, d_in.flat(), d_out.flat(), in.flat(), {.form = form});

        tensor<T, 1> host_out({n}), host_d_in({n});
        ops::gelu(host, host_out.view(), x, {.form = form});
        ops::gelu_backward(host, host_d_in.view(), dy, x, {.form = form});
        auto expected = reference::doubles(x.span()), slope = reference::doubles(dy.span());
        for (std::size_t i = 0; i < expected.size(); ++i) {
          auto const at = expected[i];
          slope[i] *= (exact_gelu(at + 1e-5, form) - exact_gelu(at - 1e-5, form)) / 2e-5;
          expected[i] = exact_gelu(at, form);
        }
        CHECK(agree<T>(out.read(ex), expected, host_out));
        CHECK(agree<T>(d_in.read(ex), slope, host_d_in));
      }
}
// [/doc]

TEST_CASE("gelu works in place, and its backward over the gradient that came in") {
  exec::cuda ex;
  auto const x = reference::normal<bf16, 1>({1021}, 1, 2.0f), dy = reference::normal<bf16, 1>({1021}, 2);
  device_rows<bf16> in(ex, x, lying::shifted, 0), d_out(ex, dy, lying::shifted, 1),
      out(ex, lying::shifted, 2, 1, 1021), d_in(ex, lying::shifted, 3, 1, 1021);
  ops::gelu(ex, out.flat(), in.flat());
  ops::gelu_backward(ex, d_in.flat(), d_out.flat(), in.flat());
  ops::gelu_backward(ex, d_out.flat(), d_out.flat(), in.flat());
  ops::gelu(ex, in.flat(), in.flat());
  CHECK(bits(in.read(ex)) == bits(out.read(ex)));
  CHECK(bits(d_out.read(ex)) == bits(d_in.read(ex)));
}
