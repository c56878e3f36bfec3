/// A product that is worked on while its sums are at hand goes through its output in blocks of rows.
#ifndef TESSERA_OPS_HOST_DETAIL_PRODUCT_BLOCKS_HPP
#define TESSERA_OPS_HOST_DETAIL_PRODUCT_BLOCKS_HPP

#include <algorithm>

#include <tessera/core/scalar.hpp>
#include <tessera/core/view.hpp>
#include <tessera/exec/host.hpp>
#include <tessera/exec/scratch.hpp>

namespace tessera::inline TESSERA_ABI::ops::host_detail {

/// Enough rows that reading the weight again for each block costs little, few enough to stay in cache.
constexpr index_t block_rows(index_t width) noexcept {
  return std::max<index_t>(256, (index_t{1} << 20) / std::max<index_t>(1, width));
}

struct block_sums;

/// Where a block's fp32 sums go: the output itself, or scratch where the output has fewer bits, so that what
/// is made of the sum is rounded once.
template <exec::host_space Ex, storage_scalar T>
view<float, 2> sums_of(Ex& ex, view<T, 2> out) {
  if constexpr (std::same_as<T, float>)
    return out;
  else
    return {ex.template handle<exec::scratch<block_sums>>().template take<float>(out.size(), site::here()),
            out.extents()};
}

} // namespace tessera::inline TESSERA_ABI::ops::host_detail

#endif
