/// The sizes of one attention call, as its backends read them.
#ifndef TESSERA_OPS_DETAIL_ATTENTION_SHAPE_HPP
#define TESSERA_OPS_DETAIL_ATTENTION_SHAPE_HPP

#include <tessera/core/extents.hpp>

namespace tessera::inline TESSERA_ABI::ops::detail {

struct attention_shape {
  index_t batch, queries, keys, heads, key_heads, width;
  index_t first_query;
  float scale;
  bool causal;

  /// Keys that the query at `t` sees.
  constexpr index_t visible(index_t t) const noexcept {
    auto const last = first_query + t + 1;
    return !causal || last > keys ? keys : last < 0 ? 0 : last;
  }
};

} // namespace tessera::inline TESSERA_ABI::ops::detail

#endif
