/// swiglu on CUDA: one pass over gate and up side by side.
#ifndef TESSERA_OPS_CUDA_SWIGLU_CUH
#define TESSERA_OPS_CUDA_SWIGLU_CUH

#include <tessera/exec/elements.cuh>
#include <tessera/ops/swiglu.hpp>

namespace tessera::inline TESSERA_ABI::ops {

namespace cuda_detail {

struct swiglu_element {
  TESSERA_HOST_DEVICE void operator()(float& y, float gate, float up) const noexcept {
    y = silu_value(gate) * up;
  }
};
struct swiglu_gradient {
  TESSERA_HOST_DEVICE void operator()(float& d_gate, float& d_up, float dy, float gate,
                                      float up) const noexcept {
    auto const silu = silu_with_slope(gate);
    d_gate = dy * up * silu.slope;
    d_up = dy * silu.value;
  }
};

} // namespace cuda_detail

template <>
struct swiglu_on<exec::cuda_backend> {
  template <exec::cuda_space Ex, storage_scalar T>
  static void forward(Ex& ex, view<T, 2, typename Ex::memory> out,
                      view<T const, 2, typename Ex::memory> gate_up) {
    auto const width = out.extent(1);
    auto const both = gate_up.stride(0);
    exec::for_elements(ex, out.extent(0), width, cuda_detail::swiglu_element{},
                       exec::writes(out.data(), out.stride(0)), exec::reads(gate_up.data(), both),
                       exec::reads(gate_up.data() + width, both));
  }

  template <exec::cuda_space Ex, storage_scalar T>
  static void backward(Ex& ex, view<T, 2, typename Ex::memory> d_gate_up,
                       view<T const, 2, typename Ex::memory> d_out,
                       view<T const, 2, typename Ex::memory> gate_up) {
    auto const width = d_out.extent(1);
    auto const both = gate_up.stride(0), d_both = d_gate_up.stride(0);
    exec::for_elements(ex, d_out.extent(0), width, cuda_detail::swiglu_gradient{},
                       exec::writes(d_gate_up.data(), d_both), exec::writes(d_gate_up.data() + width, d_both),
                       exec::reads(d_out.data(), d_out.stride(0)), exec::reads(gate_up.data(), both),
                       exec::reads(gate_up.data() + width, both));
  }
};

} // namespace tessera::inline TESSERA_ABI::ops

#endif
