#include <tessera/ops/cuda/reduce.cuh>

#include "ops/cuda/fixture.hpp"

using namespace cuda_fixture;

TEST_CASE_TEMPLATE("sums agree with a plain loop in double, with the same bits wherever the array lies", T,
                   float, bf16, fp16) {
  exec::cuda ex;
  for (auto n : {0, 1, 7, 17, 255, 2053, 40009}) {
    CAPTURE(n);
    auto const x = reference::normal<T, 1>({n}, 4);
    double sum = 0, squares = 0, magnitudes = 0;
    for (auto v : reference::doubles(x.span())) {
      sum += v;
      squares += v * v;
      magnitudes += std::fabs(v);
    }
    device_rows<T> in(ex, x, lying::aligned, 0), elsewhere(ex, x, lying::apart, 3);
    CHECK(std::fabs(ops::sum(ex, in.flat()) - sum) <= 1e-12 * magnitudes);
    CHECK(std::fabs(ops::sum_of_squares(ex, in.flat()) - squares) <= 1e-12 * squares);
    CHECK(ops::sum(ex, in.flat()) == ops::sum(ex, elsewhere.flat()));
    CHECK(ops::sum_of_squares(ex, in.flat()) == ops::sum_of_squares(ex, elsewhere.flat()));
    CHECK(ops::all_finite(ex, in.flat()));
  }
}

TEST_CASE_TEMPLATE("one infinity or NaN anywhere is found", T, float, bf16, fp16) {
  exec::cuda ex;
  for (auto value : {INFINITY, -INFINITY, NAN})
    for (index_t at : {0, 1000, 2052}) {
      auto x = reference::normal<T, 1>({2053}, 4);
      x(at) = T(value);
      device_rows<T> in(ex, x, lying::aligned, 0);
      CHECK_FALSE(ops::all_finite(ex, in.flat()));
    }
}

TEST_CASE("a sum of more elements than one pass of the grid takes") {
  exec::cuda ex;
  index_t const n = 1024 * 256 * 8 + 5;
  tensor<bf16, 1, exec::cuda_memory> ones({n});
  tensor<bf16, 1> host_ones({n});
  for (auto& v : host_ones.span()) v = bf16(1.0f);
  exec::copy(ex, ones.view(), host_ones.view());
  CHECK(ops::sum(ex, ones.view()) == static_cast<double>(n));
}
