/// linear_swiglu on the host: block by block of rows, the product's sums, and one pass over them.
#ifndef TESSERA_OPS_HOST_LINEAR_SWIGLU_HPP
#define TESSERA_OPS_HOST_LINEAR_SWIGLU_HPP

#include <tessera/ops/host/detail/product_blocks.hpp>
#include <tessera/ops/host/matmul.hpp>
#include <tessera/ops/host/swiglu.hpp>
#include <tessera/ops/linear_swiglu.hpp>

namespace tessera::inline TESSERA_ABI::ops {

template <>
struct linear_swiglu_on<exec::host_backend> {
  template <exec::host_space Ex, storage_scalar T>
  static void run(Ex& ex, view<T, 2> out, view<T, 2> gate_up, view<T const, 2> in, view<T const, 2> weight,
                  site where) {
    auto const m = out.extent(0), block = host_detail::block_rows(gate_up.extent(1));
    for (index_t row = 0; row < m; row += block) {
      auto const end = std::min(m, row + block);
      auto const kept = gate_up.slice(0, row, end);
      auto const sums = host_detail::sums_of(ex, kept);
      matmul_on<exec::host_backend>::run(ex, sums, in.slice(0, row, end), weight, false, where);
      swiglu_on<exec::host_backend>::forward(ex, out.slice(0, row, end), view<float const, 2>(sums), kept);
    }
  }
};

} // namespace tessera::inline TESSERA_ABI::ops

#endif
