#include <tessera/ops/cuda/random_normal.cuh>

#include "ops/cuda/fixture.hpp"

using namespace cuda_fixture;

TEST_CASE_TEMPLATE("random numbers are the host's up to a rounding, wherever the array lies", T, float, bf16,
                   fp16) {
  exec::cuda ex;
  exec::host host({.threads = 1});
  ops::random_normal_options const options{
      .mean = 0.5f, .deviation = 2.0f, .seed = 3, .stream = 9, .first = 5};
  for (auto n : counts)
    for (auto how : lyings) {
      device_rows<T> out(ex, how, 1, 1, n);
      tensor<T, 1> expected({n});
      ops::random_normal(ex, out.flat(), options);
      ops::random_normal(host, expected.view(), options);
      CHECK(reference::max_relative_error(out.read(ex), reference::doubles(expected.span())) <
            (sizeof(T) == 4 ? 1e-6 : 1e-2));
    }
}

TEST_CASE("without a deviation every element is the mean") {
  exec::cuda ex;
  device_rows<float> out(ex, lying::apart, 1, 1, 37);
  ops::random_normal(ex, out.flat(), {.mean = 1.25f, .deviation = 0});
  auto const y = out.read(ex);
  for (auto v : y.span()) CHECK(v == 1.25f);
}
