#include <tessera/ops/cuda/linear_swiglu.cuh>

#include <array>

#include "ops/cuda/fixture.hpp"
#include "ops/linear_swiglu_reference.hpp"
#include "support/cuda.hpp"

using namespace cuda_fixture;
using test::on_device;
using test::placement;

TEST_CASE_TEMPLATE("linear_swiglu agrees with double and with the host, wherever rows lie", T, float, bf16,
                   fp16) {
  exec::cuda ex;
  exec::host host({.threads = 1});
  for (auto const& where : {placement{}, {.offset = 1, .gap = 3}, {.gap = 8}})
    for (auto const& [m, k, f] : {std::array<index_t, 3>{0, 3, 5},
                                  {3, 0, 5},
                                  {3, 5, 0},
                                  {1, 1, 1},
                                  {7, 13, 31},
                                  {33, 16, 24},
                                  {5, 8, 1021}}) {
      CAPTURE(m);
      CAPTURE(k);
      CAPTURE(f);
      CAPTURE(where.offset);
      auto const x = reference::normal<T, 2>({m, k}, 1), w = reference::normal<T, 2>({2 * f, k}, 2);
      linear_swiglu_reference::exact const expected(m, k, f, reference::doubles(x.span()),
                                                    reference::doubles(w.span()));
      on_device<T, 2> in(ex, x, where), weight(ex, w, where), out(ex, {m, f}, where),
          gate_up(ex, {m, 2 * f}, where);
      ops::linear_swiglu(ex, out.view(), gate_up, in, weight);
      tensor<T, 2> host_out({m, f}), host_gate_up({m, 2 * f});
      ops::linear_swiglu(host, host_out.view(), host_gate_up, x, w);
      CHECK(agree<T>(out.read(ex), expected.out, host_out));
      CHECK(agree<T>(gate_up.read(ex), expected.gate_up, host_gate_up));
    }
}
