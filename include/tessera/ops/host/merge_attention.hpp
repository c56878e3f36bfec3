/// merge_attention on the host: one vectorised pass over each row.
#ifndef TESSERA_OPS_HOST_MERGE_ATTENTION_HPP
#define TESSERA_OPS_HOST_MERGE_ATTENTION_HPP

#include <tessera/ops/host/detail/loops.hpp>
#include <tessera/ops/merge_attention.hpp>

namespace tessera::inline TESSERA_ABI::ops {

template <>
struct merge_attention_on<exec::host_backend> {
  template <exec::host_space Ex, storage_scalar T>
  static void run(Ex& ex, view<float, 4> out, view<float, 3> log_sum_exp, view<T const, 4> part,
                  view<float const, 3> part_log_sum_exp) {
    auto const tokens = out.extent(1), heads = out.extent(2), width = out.extent(3);
    host_detail::for_rows(ex, out.extent(0) * tokens * heads, width, [=](index_t row) {
      auto const b = row / heads / tokens, t = row / heads % tokens, h = row % heads;
      auto& sum = *log_sum_exp.address(b, h, t);
      merge_factors const f(sum, *part_log_sum_exp.address(b, h, t));
      sum = f.log_sum_exp;
      if (f.of_part == 0) return;
      auto* y = out.address(b, t, h, 0);
      auto const* x = part.address(b, t, h, 0);
      if (f.of_out == 0) {
        TESSERA_SIMD()
        for (index_t i = 0; i < width; ++i) y[i] = f.of_part * static_cast<float>(x[i]);
      } else {
        TESSERA_SIMD()
        for (index_t i = 0; i < width; ++i) y[i] = f.of_out * y[i] + f.of_part * static_cast<float>(x[i]);
      }
    });
  }
};

} // namespace tessera::inline TESSERA_ABI::ops

#endif
