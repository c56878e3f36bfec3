#include <tessera/ops/cuda/swiglu.cuh>

#include "ops/cuda/fixture.hpp"

using namespace cuda_fixture;

namespace {

numbers exact_swiglu(numbers const& row) {
  auto const f = row.size() / 2;
  numbers out(f);
  for (std::size_t i = 0; i < f; ++i) out[i] = row[i] / (1 + std::exp(-row[i])) * row[f + i];
  return out;
}

} // namespace

TEST_CASE_TEMPLATE("swiglu and its backward agree with double and with the host, wherever rows lie", T, float,
                   bf16, fp16) {
  exec::cuda ex;
  exec::host host({.threads = 1});
  for (auto [rows, width] :
       {fixture::shape{0, 8}, {3, 0}, {1, 1}, {2, 3}, {7, 129}, {33, 16}, {3, 64}, {1, 1021}})
    for (auto how : lyings) {
      CAPTURE(rows);
      CAPTURE(width);
      auto const x = reference::normal<T, 2>({rows, 2 * width}, 1, 2.0f),
                 dy = reference::normal<T, 2>({rows, width}, 2);
      device_rows<T> in(ex, x, how, 0), d_out(ex, dy, how, 1), out(ex, how, 2, rows, width),
          d_in(ex, how, 3, rows, 2 * width);
      ops::swiglu(ex, out.rows(), in.rows());
      ops::swiglu_backward(ex, d_in.rows(), d_out.rows(), in.rows());

      tensor<T, 2> host_out({rows, width}), host_d_in({rows, 2 * width});
      ops::swiglu(host, host_out.view(), x);
      ops::swiglu_backward(host, host_d_in.view(), dy, x);
      auto const exact = reference::doubles(x.span()), slopes = reference::doubles(dy.span());
      auto const expected =
          by_rows(exact, rows, 2 * width, [](numbers const& row, index_t) { return exact_swiglu(row); });
      auto const slope = reference::gradient_by_rows(
          exact, static_cast<std::size_t>(2 * width), [&](numbers const& row, std::size_t r) {
            return reference::dot(exact_swiglu(row), part(slopes, static_cast<index_t>(r), width));
          });
      CHECK(agree<T>(out.read(ex), expected, host_out));
      CHECK(agree<T>(d_in.read(ex), slope, host_d_in));
      ops::swiglu_backward(ex, in.rows(), d_out.rows(), in.rows());
      CHECK(bits(in.read(ex)) == bits(d_in.read(ex)));
    }
}
