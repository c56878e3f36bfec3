/// rms_norm on the host: see detail/norm_rows.hpp.
#ifndef TESSERA_OPS_HOST_RMS_NORM_HPP
#define TESSERA_OPS_HOST_RMS_NORM_HPP

#include <tessera/ops/host/detail/norm_rows.hpp>
#include <tessera/ops/rms_norm.hpp>

namespace tessera::inline TESSERA_ABI::ops {

template <>
struct rms_norm_on<exec::host_backend> {
  template <exec::host_space Ex, storage_scalar T, storage_scalar R>
  static void forward(Ex& ex, view<T, 2> out, view<R, 2> sum, view<float, 1> deviation, view<R const, 2> a,
                      view<R const, 2> b, view<T const, 1> gain, float epsilon) {
    host_detail::norm_rows<false>::forward(ex, out, sum, view<float, 1>{}, deviation, a, b, gain,
                                           view<T const, 1>{}, epsilon);
  }

  template <exec::host_space Ex, storage_scalar T, storage_scalar R, storage_scalar G>
  static void backward(Ex& ex, view<R, 2> d_in, view<G, 1> d_gain, view<R const, 2> d_out,
                       view<R const, 2> in, view<float const, 1> deviation, view<T const, 1> gain,
                       norm_backward_options options, site where) {
    host_detail::norm_rows<false>::backward(ex, d_in, d_gain, view<G, 1>{}, d_out, in, view<float const, 1>{},
                                            deviation, gain, options.accumulate, options.accumulate_input,
                                            where);
  }
};

} // namespace tessera::inline TESSERA_ABI::ops

#endif
