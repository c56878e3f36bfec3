/// Matrix products on the host, by the policy of the execution space.
#ifndef TESSERA_OPS_HOST_MATMUL_HPP
#define TESSERA_OPS_HOST_MATMUL_HPP

#include <tessera/ops/host/detail/portable_product.hpp>
#include <tessera/ops/matmul.hpp>
#if defined(TESSERA_WITH_ONEDNN)
#include <tessera/ops/host/detail/onednn.hpp>
#endif

namespace tessera::inline TESSERA_ABI::ops {

template <>
struct matmul_on<exec::host_backend> {
  template <exec::host_space Ex, storage_scalar C, storage_scalar A, storage_scalar B>
  static void run(Ex& ex, view<C, 2> c, view<A const, 2> a, view<B const, 2> b, bool accumulate,
                  site = site::here()) {
    host_detail::product_by<typename Ex::product>::run(ex, c, a, b, accumulate);
  }

  template <exec::host_space Ex, storage_scalar C, storage_scalar A, storage_scalar B>
  static void run_batched(Ex& ex, view<C, 3> c, view<A const, 3> a, view<B const, 3> b, bool accumulate,
                          site where) {
    for (index_t i = 0; i < c.extent(0); ++i) run(ex, c[i], a[i], b[i], accumulate, where);
  }
};

} // namespace tessera::inline TESSERA_ABI::ops

#endif
