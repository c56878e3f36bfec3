#include <tessera/ops/cuda/add.cuh>

#include "ops/cuda/fixture.hpp"

using namespace cuda_fixture;

TEST_CASE_TEMPLATE("add agrees with double and with the host, wherever arrays lie, and in place", T, float,
                   bf16, fp16) {
  exec::cuda ex;
  exec::host host({.threads = 1});
  for (auto n : counts)
    for (auto how : lyings) {
      CAPTURE(n);
      auto const x = reference::normal<T, 1>({n}, 1), y = reference::normal<T, 1>({n}, 2);
      device_rows<T> a(ex, x, how, 0), b(ex, y, how, 1), out(ex, how, 2, 1, n);
      ops::add(ex, out.flat(), a.flat(), b.flat());
      tensor<T, 1> host_out({n});
      ops::add(host, host_out.view(), x, y);
      auto expected = reference::doubles(x.span());
      auto const other = reference::doubles(y.span());
      for (std::size_t i = 0; i < expected.size(); ++i) expected[i] += other[i];
      CHECK(agree<T>(out.read(ex), expected, host_out));
      ops::add(ex, a.flat(), a.flat(), b.flat());
      CHECK(bits(a.read(ex)) == bits(out.read(ex)));
    }
}
