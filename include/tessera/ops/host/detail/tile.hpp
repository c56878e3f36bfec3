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
#elif defined(__AVX__)
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

/// The sums of one tile. Loops over constants are unrolled by hand (folds), so that all of it stays in
/// registers at every optimisation level.
struct tile {
  static constexpr int rows = product_tuning::tile_rows, vectors = product_tuning::tile_vectors;
  static constexpr int lanes = product_tuning::lanes, columns = product_tuning::tile_columns;
  using row_sequence = std::make_integer_sequence<int, rows>;

  alignas(64) float sum[rows][columns];

  /// sum = a b for packed a[depth][rows] and b[depth][columns].
  void multiply(index_t depth, float const* __restrict a, float const* __restrict b) noexcept {
    multiply(depth, a, b, row_sequence{});
  }

private:
  template <int... Row>
  void multiply(index_t depth, float const* __restrict a, float const* __restrict b,
                std::integer_sequence<int, Row...>) noexcept {
    static_assert(vectors == 2);
    lanes_t low[rows] = {}, high[rows] = {};
    for (index_t k = 0; k < depth; ++k, a += rows, b += columns) {
      lanes_t b_low, b_high;
      std::memcpy(&b_low, b, sizeof b_low);
      std::memcpy(&b_high, b + lanes, sizeof b_high);
      ((low[Row] += a[Row] * b_low, high[Row] += a[Row] * b_high), ...);
    }
    ((std::memcpy(sum[Row], &low[Row], sizeof low[Row]),
      std::memcpy(sum[Row] + lanes, &high[Row], sizeof high[Row])),
     ...);
  }
};

} // namespace tessera::inline TESSERA_ABI::ops::host_detail

#endif
