// requires: nccl
// Overlapped products between devices, over NCCL.
#include <doctest/doctest.h>

#include <tessera/comm/cuda/nccl.cuh>
#include <tessera/comm/threads.hpp>
#include <tessera/exec/copy_cuda.hpp>
#include <tessera/ops/cuda/linear.cuh>

#include "parallel/overlapped_fixture.hpp"
#include "support/devices.hpp"

using namespace tessera;

namespace {

/// body(nccl, its space) on 1, 2, 3 ranks, as far as there are devices; checked where `checked`.
template <class Body>
void on_devices(bool checked, Body body) {
  auto const most = test::ranks_here(3);
  for (int ranks = 1; ranks <= most; ++ranks)
    comm::run_threads(ranks,
                      [&](comm::threads& threads) {
                        exec::cuda ex({.device = threads.rank()});
                        comm::nccl c(threads, ex, {.checked = checked, .stall_limit = checked ? 20.0 : 0.0});
                        body(c, ex);
                        ex.synchronize();
                      },
                      {.stall_limit = 20});
}

} // namespace

TEST_CASE_TEMPLATE("Rows that arrive while others are multiplied give the product of all rows, and gradients",
                   T, float, bf16) {
  for (bool const checked : {false, true})
    on_devices(checked, [](comm::nccl& c, exec::cuda& ex) {
      for (auto const& p : overlapped::problems()) overlapped::check_gather<T>(ex, c, p, true);
    });
}

TEST_CASE_TEMPLATE(
    "Products summed chunk by chunk have the bits of products and then one reduce_scatter, and gradients", T,
    float, bf16) {
  for (bool const checked : {false, true})
    on_devices(checked, [](comm::nccl& c, exec::cuda& ex) {
      for (auto const& p : overlapped::problems())
        overlapped::check_scatter<T>(ex, c, p, comm::summation::rank_order);
    });
}
