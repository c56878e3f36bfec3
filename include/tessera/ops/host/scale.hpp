/// scale and fill on the host: one vectorised pass.
#ifndef TESSERA_OPS_HOST_SCALE_HPP
#define TESSERA_OPS_HOST_SCALE_HPP

#include <tessera/ops/host/detail/convert.hpp>
#include <tessera/ops/host/detail/loops.hpp>
#include <tessera/ops/scale.hpp>

namespace tessera::inline TESSERA_ABI::ops {

template <>
struct scale_on<exec::host_backend> {
  template <exec::host_space Ex, storage_scalar T>
  static void scale(Ex& ex, view<T, 1> out, view<T const, 1> in, float factor) {
    host_detail::for_elements(ex, in.size(),
                              [factor, y = out.data(), x = in.data()](index_t begin, index_t end) {
                                TESSERA_SIMD()
                                for (auto i = begin; i < end; ++i)
                                  store(y[i], factor * static_cast<float>(x[i]));
                              });
  }

  template <exec::host_space Ex, storage_scalar T>
  static void fill(Ex& ex, view<T, 1> out, float value) {
    host_detail::for_elements(ex, out.size(), [value, y = out.data()](index_t begin, index_t end) {
      host_detail::fill_row(y + begin, end - begin, value);
    });
  }
};

} // namespace tessera::inline TESSERA_ABI::ops

#endif
