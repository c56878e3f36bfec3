/// Joins what attention found in two disjoint sets of keys, for the same queries: with `out` and
/// `log_sum_exp` of one set and `part` and `part_log_sum_exp` of the other,
///
///     top = max(log_sum_exp, part_log_sum_exp)
///     a = exp(log_sum_exp - top),            b = exp(part_log_sum_exp - top)
///     out = (a out + b part) / (a + b),      log_sum_exp = top + log(a + b)
///
/// which is attention over both sets, whatever the size of the scores (Rabe and Staats, "Self-attention does
/// not need O(n^2) memory", 2021). A query whose log_sum_exp is minus infinity saw no key: its row is not
/// read.
///
///     ops::merge_attention(ex, out, log_sum_exp, part, part_log_sum_exp);
///
/// `out` is in fp32, so that a sequence of merges rounds no more than one attention does; ops/copy_rows.hpp
/// brings it to its storage type at the end. Cost: two reads and a write an element.
#ifndef TESSERA_OPS_MERGE_ATTENTION_HPP
#define TESSERA_OPS_MERGE_ATTENTION_HPP

#include <limits>

#include <tessera/core/scalar.hpp>
#include <tessera/exec/space.hpp>
#include <tessera/ops/elementary.hpp>
#include <tessera/ops/shapes.hpp>

namespace tessera::inline TESSERA_ABI::ops {

/// What becomes of one query's row: out = of_out out + of_part part. A factor of 0 takes nothing, not even a
/// NaN.
struct merge_factors {
  float of_out, of_part, log_sum_exp;

  TESSERA_HOST_DEVICE merge_factors(float out, float part) noexcept {
    constexpr auto nothing = -std::numeric_limits<float>::infinity();
    if (part == nothing) {
      of_out = 1, of_part = 0, log_sum_exp = out;
    } else if (out == nothing) {
      of_out = 0, of_part = 1, log_sum_exp = part;
    } else {
      auto const top = elementary::larger(out, part);
      auto const a = elementary::exp(out - top), b = elementary::exp(part - top);
      of_out = a / (a + b);
      of_part = b / (a + b);
      log_sum_exp = top + elementary::log(a + b);
    }
  }
};

/// One implementation a backend: `run(ex, out, log_sum_exp, part, part_log_sum_exp)`.
template <class Backend>
struct merge_attention_on;

/// out[B, T, H, D] and part alike may be strided with dense rows, log_sum_exp[B, H, T] and its part may have
/// gaps between rows of T. out and part do not overlap. Throws size_error.
template <exec::space Ex, class T>
  requires storage_scalar<std::remove_const_t<T>>
void merge_attention(Ex& ex, view<float, 4, typename Ex::memory> out,
                     view<float, 3, typename Ex::memory> log_sum_exp, view<T, 4, typename Ex::memory> part,
                     input<float, 3, typename Ex::memory> part_log_sum_exp, site where = site::here()) {
  require_dense_rows("merge_attention", "out", out, where);
  require_rows("merge_attention", "part", part, out.extents(), where);
  extents<3> const sums{out.extent(0), out.extent(2), out.extent(1)};
  require_rows("merge_attention", "log_sum_exp", log_sum_exp, sums, where);
  require_rows("merge_attention", "part_log_sum_exp", part_log_sum_exp, sums, where);
  merge_attention_on<typename Ex::backend>::run(
      ex, out, log_sum_exp, view<std::remove_const_t<T> const, 4, typename Ex::memory>(part),
      part_log_sum_exp);
}

} // namespace tessera::inline TESSERA_ABI::ops

#include <tessera/ops/host/merge_attention.hpp>

#endif
