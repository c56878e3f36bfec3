#include <tessera/ops/cuda/scale.cuh>

#include "ops/cuda/fixture.hpp"

using namespace cuda_fixture;

TEST_CASE_TEMPLATE("scale and fill agree with the host to the bit, wherever arrays lie, and in place", T,
                   float, bf16, fp16) {
  exec::cuda ex;
  exec::host host({.threads = 1});
  for (auto n : counts)
    for (auto how : lyings) {
      CAPTURE(n);
      auto const x = reference::normal<T, 1>({n}, 1);
      device_rows<T> in(ex, x, how, 0), out(ex, how, 1, 1, n);
      tensor<T, 1> host_out({n});
      ops::scale(ex, out.flat(), in.flat(), 0.3f);
      ops::scale(host, host_out.view(), x, 0.3f);
      CHECK(bits(out.read(ex)) == bits(host_out));
      ops::scale(ex, in.flat(), in.flat(), 0.3f);
      CHECK(bits(in.read(ex)) == bits(host_out));
      ops::fill(ex, out.flat(), 0.1f);
      ops::fill(host, host_out.view(), 0.1f);
      CHECK(bits(out.read(ex)) == bits(host_out));
    }
}
