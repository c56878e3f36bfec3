/// copy_rows and add_rows on the host: one vectorised pass over each row.
#ifndef TESSERA_OPS_HOST_COPY_ROWS_HPP
#define TESSERA_OPS_HOST_COPY_ROWS_HPP

#include <tessera/ops/copy_rows.hpp>
#include <tessera/ops/detail/row_places.hpp>
#include <tessera/ops/host/detail/convert.hpp>
#include <tessera/ops/host/detail/loops.hpp>

namespace tessera::inline TESSERA_ABI::ops {

template <>
struct copy_rows_on<exec::host_backend> {
  template <bool Adds, exec::host_space Ex, storage_scalar To, storage_scalar From>
  static void run(Ex& ex, view<To, 4> out, view<From const, 4> in) {
    if (out.empty()) return;
    detail::row_places const places(out, in);
    host_detail::for_rows(ex, places.rows, places.width, [places](index_t row) {
      auto* y = places.to_row(row);
      auto const* x = places.from_row(row);
      auto const width = places.width;
      if constexpr (Adds) {
        TESSERA_SIMD()
        for (index_t i = 0; i < width; ++i) store(y[i], static_cast<float>(y[i]) + static_cast<float>(x[i]));
      } else {
        host_detail::convert(y, x, width);
      }
    });
  }
};

} // namespace tessera::inline TESSERA_ABI::ops

#endif
