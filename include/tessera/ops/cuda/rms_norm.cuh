/// rms_norm on CUDA: see detail/norm_rows.cuh.
#ifndef TESSERA_OPS_CUDA_RMS_NORM_CUH
#define TESSERA_OPS_CUDA_RMS_NORM_CUH

#include <tessera/ops/cuda/detail/norm_rows.cuh>
#include <tessera/ops/rms_norm.hpp>

namespace tessera::inline TESSERA_ABI::ops {

template <>
struct rms_norm_on<exec::cuda_backend> {
  template <exec::cuda_space Ex, storage_scalar T, storage_scalar R, memory_space M>
  static void forward(Ex& ex, view<T, 2, M> out, view<R, 2, M> sum, view<float, 1, M> deviation,
                      view<R const, 2, M> a, view<R const, 2, M> b, view<T const, 1, M> gain, float epsilon) {
    cuda_detail::norm_rows<false>::forward(ex, out, sum, view<float, 1, M>{}, deviation, a, b, gain,
                                           view<T const, 1, M>{}, epsilon);
  }

  template <exec::cuda_space Ex, storage_scalar T, storage_scalar R, storage_scalar G, memory_space M>
  static void backward(Ex& ex, view<R, 2, M> d_in, view<G, 1, M> d_gain, view<R const, 2, M> d_out,
                       view<R const, 2, M> in, view<float const, 1, M> deviation, view<T const, 1, M> gain,
                       norm_backward_options options, site where) {
    cuda_detail::norm_rows<false>::backward(ex, d_in, d_gain, view<G, 1, M>{}, d_out, in,
                                            view<float const, 1, M>{}, deviation, gain, options.accumulate,
                                            options.accumulate_input, where);
  }
};

} // namespace tessera::inline TESSERA_ABI::ops

#endif
