/// Sums on the host: chunks in parallel, their results in order.
#ifndef TESSERA_OPS_HOST_REDUCE_HPP
#define TESSERA_OPS_HOST_REDUCE_HPP

#include <tessera/ops/host/detail/loops.hpp>
#include <tessera/ops/reduce.hpp>

namespace tessera::inline TESSERA_ABI::ops {

template <>
struct reduce_on<exec::host_backend> {
  template <exec::host_space Ex, storage_scalar T, class Term>
  static double sum(Ex& ex, view<T const, 1> in, Term term, site where) {
    constexpr index_t chunk = 16384;
    auto const count = in.size(), chunks = (count + chunk - 1) / chunk;
    auto* partial = ex.template handle<exec::scratch<reduce_on>>().template take<double>(chunks, where);
    host_detail::for_rows(ex, chunks, chunk, [=, x = in.data()](index_t c) {
      auto const* part = x + c * chunk;
      auto const n = count - c * chunk < chunk ? count - c * chunk : chunk;
      partial[c] = host_detail::sum<double>(n, [=](index_t i) { return term(part[i]); });
    });
    auto total = 0.0;
    for (index_t c = 0; c < chunks; ++c) total += partial[c];
    return total;
  }
};

} // namespace tessera::inline TESSERA_ABI::ops

#endif
