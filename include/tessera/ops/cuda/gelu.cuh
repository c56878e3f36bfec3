/// gelu on CUDA: one pass.
#ifndef TESSERA_OPS_CUDA_GELU_CUH
#define TESSERA_OPS_CUDA_GELU_CUH

#include <tessera/exec/elements.cuh>
#include <tessera/ops/gelu.hpp>

namespace tessera::inline TESSERA_ABI::ops {

namespace cuda_detail {

template <gelu_form Form>
struct gelu_element {
  TESSERA_HOST_DEVICE void operator()(float& y, float x) const noexcept { y = gelu_value<Form>(x); }
};
template <gelu_form Form>
struct gelu_gradient {
  TESSERA_HOST_DEVICE void operator()(float& dx, float dy, float x) const noexcept {
    dx = dy * gelu_slope<Form>(x);
  }
};

} // namespace cuda_detail

template <>
struct gelu_on<exec::cuda_backend> {
  template <exec::cuda_space Ex, storage_scalar T>
  static void forward(Ex& ex, view<T, 1, typename Ex::memory> out, view<T const, 1, typename Ex::memory> in,
                      gelu_form form) {
    auto const run = [&](auto element) {
      exec::for_elements(ex, in.size(), element, exec::writes(out.data()), exec::reads(in.data()));
    };
    if (form == gelu_form::tanh)
      run(cuda_detail::gelu_element<gelu_form::tanh>{});
    else
      run(cuda_detail::gelu_element<gelu_form::erf>{});
  }

  template <exec::cuda_space Ex, storage_scalar T>
  static void backward(Ex& ex, view<T, 1, typename Ex::memory> d_in,
                       view<T const, 1, typename Ex::memory> d_out, view<T const, 1, typename Ex::memory> in,
                       gelu_form form) {
    auto const run = [&](auto element) {
      exec::for_elements(ex, in.size(), element, exec::writes(d_in.data()), exec::reads(d_out.data()),
                         exec::reads(in.data()));
    };
    if (form == gelu_form::tanh)
      run(cuda_detail::gelu_gradient<gelu_form::tanh>{});
    else
      run(cuda_detail::gelu_gradient<gelu_form::erf>{});
  }
};

} // namespace tessera::inline TESSERA_ABI::ops

#endif
