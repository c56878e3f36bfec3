/// gelu on the host: one vectorised pass.
#ifndef TESSERA_OPS_HOST_GELU_HPP
#define TESSERA_OPS_HOST_GELU_HPP

#include <tessera/ops/gelu.hpp>
#include <tessera/ops/host/detail/loops.hpp>

namespace tessera::inline TESSERA_ABI::ops {

template <>
struct gelu_on<exec::host_backend> {
  template <exec::host_space Ex, storage_scalar T>
  static void forward(Ex& ex, view<T, 1> out, view<T const, 1> in, gelu_form form) {
    if (form == gelu_form::tanh)
      forward_as<gelu_form::tanh>(ex, out, in);
    else
      forward_as<gelu_form::erf>(ex, out, in);
  }

  template <exec::host_space Ex, storage_scalar T>
  static void backward(Ex& ex, view<T, 1> d_in, view<T const, 1> d_out, view<T const, 1> in, gelu_form form) {
    if (form == gelu_form::tanh)
      backward_as<gelu_form::tanh>(ex, d_in, d_out, in);
    else
      backward_as<gelu_form::erf>(ex, d_in, d_out, in);
  }

private:
  template <gelu_form Form, exec::host_space Ex, storage_scalar T>
  static void forward_as(Ex& ex, view<T, 1> out, view<T const, 1> in) {
    host_detail::for_elements(ex, in.size(), [y = out.data(), x = in.data()](index_t begin, index_t end) {
      TESSERA_SIMD()
      for (auto i = begin; i < end; ++i) store(y[i], gelu_value<Form>(x[i]));
    });
  }

  template <gelu_form Form, exec::host_space Ex, storage_scalar T>
  static void backward_as(Ex& ex, view<T, 1> d_in, view<T const, 1> d_out, view<T const, 1> in) {
    host_detail::for_elements(
        ex, in.size(), [dx = d_in.data(), dy = d_out.data(), x = in.data()](index_t begin, index_t end) {
          TESSERA_SIMD()
          for (auto i = begin; i < end; ++i) store(dx[i], static_cast<float>(dy[i]) * gelu_slope<Form>(x[i]));
        });
  }
};

} // namespace tessera::inline TESSERA_ABI::ops

#endif
