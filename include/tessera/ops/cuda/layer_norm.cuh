/// layer_norm on CUDA: see detail/norm_rows.cuh.
#ifndef TESSERA_OPS_CUDA_LAYER_NORM_CUH
#define TESSERA_OPS_CUDA_LAYER_NORM_CUH

#include <tessera/ops/cuda/detail/norm_rows.cuh>
#include <tessera/ops/layer_norm.hpp>

namespace tessera::inline TESSERA_ABI::ops {

template <>
struct layer_norm_on<exec::cuda_backend> {
  template <exec::cuda_space Ex, storage_scalar T, storage_scalar R, memory_space M>
  static void forward(Ex& ex, view<T, 2, M> out, view<R, 2, M> sum, view<float, 1, M> mean,
                      view<float, 1, M> deviation, view<R const, 2, M> a, view<R const, 2, M> b,
                      view<T const, 1, M> gain, view<T const, 1, M> bias, float epsilon) {
    cuda_detail::norm_rows<true>::forward(ex, out, sum, mean, deviation, a, b, gain, bias, epsilon);
  }

  template <exec::cuda_space Ex, storage_scalar T, storage_scalar R, storage_scalar G, memory_space M>
  static void backward(Ex& ex, view<R, 2, M> d_in, view<G, 1, M> d_gain, view<G, 1, M> d_bias,
                       view<R const, 2, M> d_out, view<R const, 2, M> in, view<float const, 1, M> mean,
                       view<float const, 1, M> deviation, view<T const, 1, M> gain,
                       norm_backward_options options, site where) {
    cuda_detail::norm_rows<true>::backward(ex, d_in, d_gain, d_bias, d_out, in, mean, deviation, gain,
                                           options.accumulate, options.accumulate_input, where);
  }
};

} // namespace tessera::inline TESSERA_ABI::ops

#endif
