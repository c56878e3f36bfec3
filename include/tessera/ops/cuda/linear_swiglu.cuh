/// linear_swiglu on CUDA: the product into gate_up, and the unit from what is stored there.
#ifndef TESSERA_OPS_CUDA_LINEAR_SWIGLU_CUH
#define TESSERA_OPS_CUDA_LINEAR_SWIGLU_CUH

#include <tessera/ops/cuda/matmul.cuh>
#include <tessera/ops/cuda/swiglu.cuh>
#include <tessera/ops/linear_swiglu.hpp>

namespace tessera::inline TESSERA_ABI::ops {

template <>
struct linear_swiglu_on<exec::cuda_backend> {
  template <exec::cuda_space Ex, storage_scalar T>
  static void run(Ex& ex, view<T, 2, typename Ex::memory> out, view<T, 2, typename Ex::memory> gate_up,
                  view<T const, 2, typename Ex::memory> in, view<T const, 2, typename Ex::memory> weight,
                  site where) {
    matmul_on<exec::cuda_backend>::run(ex, gate_up, in, weight, false, where);
    swiglu_on<exec::cuda_backend>::forward(ex, out, view<T const, 2, typename Ex::memory>(gate_up));
  }
};

} // namespace tessera::inline TESSERA_ABI::ops

#endif
