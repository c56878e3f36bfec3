/// scale and fill on CUDA: one pass.
#ifndef TESSERA_OPS_CUDA_SCALE_CUH
#define TESSERA_OPS_CUDA_SCALE_CUH

#include <tessera/exec/elements.cuh>
#include <tessera/ops/scale.hpp>

namespace tessera::inline TESSERA_ABI::ops {

namespace cuda_detail {
struct scale_element {
  float factor;
  TESSERA_HOST_DEVICE void operator()(float& y, float x) const noexcept { y = factor * x; }
};
struct fill_element {
  float value;
  TESSERA_HOST_DEVICE void operator()(float& y) const noexcept { y = value; }
};
} // namespace cuda_detail

template <>
struct scale_on<exec::cuda_backend> {
  template <exec::cuda_space Ex, storage_scalar T>
  static void scale(Ex& ex, view<T, 1, typename Ex::memory> out, view<T const, 1, typename Ex::memory> in,
                    float factor) {
    exec::for_elements(ex, in.size(), cuda_detail::scale_element{factor}, exec::writes(out.data()),
                       exec::reads(in.data()));
  }

  template <exec::cuda_space Ex, storage_scalar T>
  static void fill(Ex& ex, view<T, 1, typename Ex::memory> out, float value) {
    exec::for_elements(ex, out.size(), cuda_detail::fill_element{value}, exec::writes(out.data()));
  }
};

} // namespace tessera::inline TESSERA_ABI::ops

#endif
