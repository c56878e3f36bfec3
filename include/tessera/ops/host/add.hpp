/// add on the host: one vectorised pass.
#ifndef TESSERA_OPS_HOST_ADD_HPP
#define TESSERA_OPS_HOST_ADD_HPP

#include <tessera/ops/add.hpp>
#include <tessera/ops/host/detail/loops.hpp>

namespace tessera::inline TESSERA_ABI::ops {

template <>
struct add_on<exec::host_backend> {
  template <exec::host_space Ex, storage_scalar T>
  static void run(Ex& ex, view<T, 1> out, view<T const, 1> a, view<T const, 1> b) {
    host_detail::for_elements(ex, out.size(),
                              [o = out.data(), x = a.data(), y = b.data()](index_t begin, index_t end) {
                                TESSERA_SIMD()
                                for (auto i = begin; i < end; ++i)
                                  store(o[i], static_cast<float>(x[i]) + static_cast<float>(y[i]));
                              });
  }
};

} // namespace tessera::inline TESSERA_ABI::ops

#endif
