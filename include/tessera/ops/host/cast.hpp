/// cast on the host: one vectorised pass.
#ifndef TESSERA_OPS_HOST_CAST_HPP
#define TESSERA_OPS_HOST_CAST_HPP

#include <tessera/ops/cast.hpp>
#include <tessera/ops/host/detail/convert.hpp>
#include <tessera/ops/host/detail/loops.hpp>

namespace tessera::inline TESSERA_ABI::ops {

template <>
struct cast_on<exec::host_backend> {
  template <exec::host_space Ex, storage_scalar To, storage_scalar From>
  static void run(Ex& ex, view<To, 1> out, view<From const, 1> in) {
    host_detail::for_elements(ex, in.size(), [y = out.data(), x = in.data()](index_t begin, index_t end) {
      host_detail::convert(y + begin, x + begin, end - begin);
    });
  }
};

} // namespace tessera::inline TESSERA_ABI::ops

#endif
