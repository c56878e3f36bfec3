/// add on CUDA: one pass.
#ifndef TESSERA_OPS_CUDA_ADD_CUH
#define TESSERA_OPS_CUDA_ADD_CUH

#include <tessera/exec/elements.cuh>
#include <tessera/ops/add.hpp>

namespace tessera::inline TESSERA_ABI::ops {

namespace cuda_detail {
struct add_element {
  TESSERA_HOST_DEVICE void operator()(float& y, float a, float b) const noexcept { y = a + b; }
};
} // namespace cuda_detail

template <>
struct add_on<exec::cuda_backend> {
  template <exec::cuda_space Ex, storage_scalar T>
  static void run(Ex& ex, view<T, 1, typename Ex::memory> out, view<T const, 1, typename Ex::memory> a,
                  view<T const, 1, typename Ex::memory> b) {
    exec::for_elements(ex, out.size(), cuda_detail::add_element{}, exec::writes(out.data()),
                       exec::reads(a.data()), exec::reads(b.data()));
  }
};

} // namespace tessera::inline TESSERA_ABI::ops

#endif
