/// The register tile at the heart of the portable product: a few rows by a few vectors of sums, fed from
/// packed panels. Vectors are the compiler's own (`vector_size`), so the same source serves SSE, AVX2 and
/// AVX-512.
#ifndef TESSERA_OPS_HOST_DETAIL_TILE_HPP
#define TESSERA_OPS_HOST_DETAIL_TILE_HPP

#include <cstring>
#include <utility>

#include <tessera/core/extents.hpp>

namespace tessera::inline TESSERA_ABI::ops::host_detail {

/// Sizes of the blocks that a product is cut into; the defaults fit caches of 32 KiB, 512 KiB and up.
struct product_tuning {
#if defined(__AVX512F__)
  static constexpr int lanes = 16, tile_rows = 12;
#elif defined(__AVX2__)
  static constexpr int lanes = 8, tile_rows = 6;
#else
  static constexpr int lanes = 4, tile_rows = 6;
#endif
  static constexpr int tile_vectors = 2;
  static constexpr int tile_columns = lanes * tile_vectors;
  static constexpr index_t depth = 384;          ///< A panel of b, depth x tile_columns, stays in L1.
  static constexpr index_t block_rows = 144;     ///< A block of a, block_rows x depth, stays in L2.
  static constexpr index_t block_columns = 1024; ///< A block of b, depth x block_columns, stays in L3.
};

using lanes_t = float __attribute__((vector_size(product_tuning::lanes * sizeof(float))));

/// How the left operand of a tile lies in memory.
enum class left { rows_adjacent, depth_adjacent };

/// c[tile_rows, tile_columns] = or += a b over `depth`, with b packed as [depth][tile_columns]. Element (row,
/// k) of a is a[k * a_stride + row] where rows are adjacent, a[row * a_stride + k] where depth is. Loops over
/// constants are unrolled by hand (folds), so that the sums stay in registers at every optimisation level.
template <left Left>
[[gnu::noinline]] inline void multiply_tile(float* c, index_t c_stride, bool add, index_t depth,
                                            float const* a, index_t a_stride, float const* b) noexcept {
  constexpr int rows = product_tuning::tile_rows, lanes = product_tuning::lanes;
  static_assert(product_tuning::tile_vectors == 2);
  auto const load = [](float const* from) {
    lanes_t value;
    std::memcpy(&value, from, sizeof value);
    return value;
  };
  auto const unrolled = [&]<int... Row>(std::integer_sequence<int, Row...>) {
    lanes_t low[rows] = {}, high[rows] = {};
    for (index_t k = 0; k < depth; ++k, b += 2 * lanes) {
      auto const b_low = load(b), b_high = load(b + lanes);
      if constexpr (Left == left::rows_adjacent) {
        ((low[Row] += a[Row] * b_low, high[Row] += a[Row] * b_high), ...);
        a += a_stride;
      } else {
        ((low[Row] += a[Row * a_stride] * b_low, high[Row] += a[Row * a_stride] * b_high), ...);
        ++a;
      }
    }
    if (add) ((low[Row] += load(c + Row * c_stride), high[Row] += load(c + Row * c_stride + lanes)), ...);
    ((std::memcpy(c + Row * c_stride, &low[Row], sizeof low[Row]),
      std::memcpy(c + Row * c_stride + lanes, &high[Row], sizeof high[Row])),
     ...);
  };
  unrolled(std::make_integer_sequence<int, rows>{});
}

} // namespace tessera::inline TESSERA_ABI::ops::host_detail

#endif
