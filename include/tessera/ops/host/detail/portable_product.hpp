/// The matrix product without a library: panels of both operands are packed (and widened to float) block by
/// block, and a register tile runs over them (Goto and van de Geijn, "Anatomy of high-performance matrix
/// multiplication", 2008). Each element's sum is made in one order whatever the number of threads.
#ifndef TESSERA_OPS_HOST_DETAIL_PORTABLE_PRODUCT_HPP
#define TESSERA_OPS_HOST_DETAIL_PORTABLE_PRODUCT_HPP

#include <algorithm>
#include <vector>

#include <tessera/core/memory.hpp>
#include <tessera/exec/host.hpp>
#include <tessera/ops/host/detail/convert.hpp>
#include <tessera/ops/host/detail/loops.hpp>
#include <tessera/ops/host/detail/tile.hpp>

namespace tessera::inline TESSERA_ABI::ops::host_detail {

/// How a policy of exec::host multiplies: `run(ex, c, a, b, accumulate)` with c's columns adjacent, and
/// either the rows or the columns of a and of b adjacent.
template <class Product>
struct product_by;

/// out[column][row] = in[row][column] for four rows of `count` elements.
inline void transpose_four(float* __restrict out, index_t out_stride, float const* const (&in)[4],
                           index_t count) noexcept {
  using four = float __attribute__((vector_size(16)));
  auto const load = [](float const* from) {
    four value;
    std::memcpy(&value, from, sizeof value);
    return value;
  };
  index_t i = 0;
  for (; i + 4 <= count; i += 4) {
    auto const a = load(in[0] + i), b = load(in[1] + i), c = load(in[2] + i), d = load(in[3] + i);
    auto const ab_low = __builtin_shufflevector(a, b, 0, 4, 1, 5);
    auto const ab_high = __builtin_shufflevector(a, b, 2, 6, 3, 7);
    auto const cd_low = __builtin_shufflevector(c, d, 0, 4, 1, 5);
    auto const cd_high = __builtin_shufflevector(c, d, 2, 6, 3, 7);
    four const column[4] = {__builtin_shufflevector(ab_low, cd_low, 0, 1, 4, 5),
                            __builtin_shufflevector(ab_low, cd_low, 2, 3, 6, 7),
                            __builtin_shufflevector(ab_high, cd_high, 0, 1, 4, 5),
                            __builtin_shufflevector(ab_high, cd_high, 2, 3, 6, 7)};
    for (int j = 0; j < 4; ++j) std::memcpy(out + (i + j) * out_stride, &column[j], sizeof column[j]);
  }
  for (; i < count; ++i)
    for (int j = 0; j < 4; ++j) out[i * out_stride + j] = in[j][i];
}

/// Packs `lines` x `depth` of an operand into panels of Width lines, each [depth][Width], the last one filled
/// up with zeros. A line is a row of a or a column of b; element (line, k) is from[line * line_stride + k *
/// k_stride], and one of the strides is 1.
template <int Width, storage_scalar T>
void pack_panels(float* __restrict out, T const* __restrict from, index_t line_stride, index_t k_stride,
                 index_t lines, index_t depth) noexcept {
  constexpr index_t piece = 64; // of a line, when lines are contiguous: staged as float, then transposed
  if (line_stride == 1) {
    // Row by row of the source over four panels at a time: whole cache lines, few pages.
    for (index_t first = 0; first < lines; first += 4 * Width) {
      auto const last = std::min(lines, first + 4 * Width);
      for (index_t k = 0; k < depth; ++k)
        for (index_t line = first; line < last; line += Width) {
          auto* to = out + line * depth + k * Width;
          auto const* source = from + line + k * k_stride;
          if (last - line >= Width) {
            for (int i = 0; i < Width; ++i) to[i] = widened(source[i]);
          } else {
            for (int i = 0; i < Width; ++i) to[i] = line + i < last ? widened(source[i]) : 0.0f;
          }
        }
    }
    return;
  }
  for (index_t line = 0; line < lines; line += Width) {
    auto* to = out + line * depth;
    auto const valid = std::min<index_t>(Width, lines - line);
    if (valid < Width) std::fill(to, to + Width * depth, 0.0f);
    for (index_t k = 0; k < depth; k += piece) {
      auto const count = std::min(piece, depth - k);
      index_t i = 0;
      for (; i + 4 <= valid; i += 4) {
        alignas(64) float staged[4][piece];
        float const* rows[4];
        for (int j = 0; j < 4; ++j) {
          auto const* source = from + (line + i + j) * line_stride + k;
          if constexpr (std::same_as<T, float>) {
            rows[j] = source;
          } else {
            convert(staged[j], source, count);
            rows[j] = staged[j];
          }
        }
        transpose_four(to + k * Width + i, Width, rows, count);
      }
      for (; i < valid; ++i)
        for (index_t at = 0; at < count; ++at)
          to[(k + at) * Width + i] = widened(from[(line + i) * line_stride + k + at]);
    }
  }
}

/// The part of a tile that lies inside c, or a tile of a c that is not float: c[rows, columns] = or += a b.
template <storage_scalar C>
void multiply_edge_tile(C* c, index_t c_stride, index_t rows, index_t columns, bool add, index_t depth,
                        float const* a, float const* b) noexcept {
  constexpr int width = product_tuning::tile_columns;
  alignas(64) float sum[product_tuning::tile_rows][width];
  multiply_tile<left::rows_adjacent>(&sum[0][0], width, false, depth, a, product_tuning::tile_rows, b);
  for (index_t i = 0; i < rows; ++i)
    for (index_t j = 0; j < columns; ++j)
      c[i * c_stride + j] = C((add ? widened(c[i * c_stride + j]) : 0.0f) + sum[i][j]);
}

/// Packed panels and, where c is stored in 16 bits, fp32 sums: one piece for each worker, kept between calls.
struct product_buffers {
  static constexpr index_t panels =
      product_tuning::depth * (product_tuning::block_rows + product_tuning::block_columns);
  static constexpr index_t sum_rows = 2 * product_tuning::block_rows;
  static constexpr index_t sums = sum_rows * product_tuning::block_columns;

  explicit product_buffers(memory_account counted) noexcept : account(counted) {}

  memory_account account;
  std::vector<buffer<>> worker;

  /// At least `count` floats for each of `workers`.
  void reserve(int workers, index_t count) {
    if (std::ssize(worker) < workers) worker.resize(static_cast<std::size_t>(workers));
    auto const bytes = count * static_cast<index_t>(sizeof(float));
    for (int w = 0; w < workers; ++w)
      if (worker[static_cast<std::size_t>(w)].bytes() < bytes)
        worker[static_cast<std::size_t>(w)] = buffer<>(bytes, account);
  }
  float* of(index_t w) noexcept { return static_cast<float*>(worker[static_cast<std::size_t>(w)].data()); }
};

/// One worker's share: c (+)= a b on one thread.
template <storage_scalar C, storage_scalar A, storage_scalar B>
void multiply_block(float* memory, view<C, 2> c, view<A const, 2> a, view<B const, 2> b,
                    bool accumulate) noexcept {
  using tuning = product_tuning;
  auto const m = c.extent(0), n = c.extent(1), k = a.extent(1);
  auto* const packed_a = memory;
  auto* const packed_b = packed_a + tuning::block_rows * tuning::depth;
  auto const depth_block =
      k <= tuning::depth ? k : (k + (k - 1) / tuning::depth) / ((k - 1) / tuning::depth + 1);

  for (index_t column = 0; column < n; column += tuning::block_columns) {
    auto const columns = std::min(tuning::block_columns, n - column);
    for (index_t from = 0; from < k; from += depth_block) {
      auto const depth = std::min(depth_block, k - from);
      auto const add = accumulate || from > 0;
      pack_panels<tuning::tile_columns>(packed_b, b.data() + from * b.stride(0) + column * b.stride(1),
                                        b.stride(1), b.stride(0), columns, depth);
      for (index_t row = 0; row < m; row += tuning::block_rows) {
        auto const rows = std::min(tuning::block_rows, m - row);
        pack_panels<tuning::tile_rows>(packed_a, a.data() + row * a.stride(0) + from * a.stride(1),
                                       a.stride(0), a.stride(1), rows, depth);
        for (index_t j = 0; j < columns; j += tuning::tile_columns)
          for (index_t i = 0; i < rows; i += tuning::tile_rows) {
            auto const valid_rows = std::min<index_t>(tuning::tile_rows, rows - i);
            auto const valid_columns = std::min<index_t>(tuning::tile_columns, columns - j);
            auto* to = c.data() + (row + i) * c.stride(0) + column + j;
            auto const* left_panel = packed_a + i * depth;
            auto const* right_panel = packed_b + j * depth;
            if constexpr (std::same_as<C, float>)
              if (valid_rows == tuning::tile_rows && valid_columns == tuning::tile_columns) {
                multiply_tile<left::rows_adjacent>(to, c.stride(0), add, depth, left_panel, tuning::tile_rows,
                                                   right_panel);
                continue;
              }
            multiply_edge_tile(to, c.stride(0), valid_rows, valid_columns, add, depth, left_panel,
                               right_panel);
          }
      }
    }
  }
}

/// The same for a c of 16 bits and sums of several depth blocks: they are kept in fp32, a block of c at a
/// time, and rounded once.
template <storage_scalar C, storage_scalar A, storage_scalar B>
void multiply_in_float(float* memory, view<C, 2> c, view<A const, 2> a, view<B const, 2> b,
                       bool accumulate) noexcept {
  auto const m = c.extent(0), n = c.extent(1);
  for (index_t column = 0; column < n; column += product_tuning::block_columns)
    for (index_t row = 0; row < m; row += product_buffers::sum_rows) {
      auto const rows = std::min(product_buffers::sum_rows, m - row);
      auto const columns = std::min(product_tuning::block_columns, n - column);
      view<float, 2> const sums(memory + product_buffers::panels, {rows, columns});
      for (index_t i = 0; i < rows && accumulate; ++i) convert(&sums(i, 0), &c(row + i, column), columns);
      multiply_block(memory, sums, a.slice(0, row, row + rows), b.slice(1, column, column + columns),
                     accumulate);
      for (index_t i = 0; i < rows; ++i) convert(&c(row + i, column), &sums(i, 0), columns);
    }
}

template <>
struct product_by<exec::portable_product> {
  template <exec::host_space Ex, storage_scalar C, storage_scalar A, storage_scalar B>
  static void run(Ex& ex, view<C, 2> c, view<A const, 2> a, view<B const, 2> b, bool accumulate) {
    using tuning = product_tuning;
    auto const m = c.extent(0), n = c.extent(1), k = a.extent(1);
    if (k == 0) {
      for (index_t i = 0; i < m && !accumulate; ++i) std::fill_n(&c(i, 0), n, C(0.0f));
      return;
    }
    if (m <= few_rows && a.stride(1) == 1 && b.stride(0) == 1)
      return multiply_few_rows(ex, c, a, b, accumulate);

    // Workers form a grid over c that makes each one pack as little as possible; small products stay alone.
    auto const tiles_m = (m + tuning::tile_rows - 1) / tuning::tile_rows;
    auto const tiles_n = (n + tuning::tile_columns - 1) / tuning::tile_columns;
    index_t grid_m = 1, grid_n = 1;
    if (static_cast<double>(m) * static_cast<double>(n) * static_cast<double>(k) > 2e5)
      for (index_t g = 1; g <= ex.threads(); ++g)
        if (ex.threads() % g == 0 && (m / g + n / (ex.threads() / g) < m / grid_m + n / grid_n)) {
          grid_m = g;
          grid_n = ex.threads() / g;
        }
    auto const workers = grid_m * grid_n;

    auto& buffers = ex.template handle<product_buffers>();
    auto const keeps_sums = !std::same_as<C, float> && k > tuning::depth;
    buffers.reserve(narrow<int>(workers), product_buffers::panels + (keeps_sums ? product_buffers::sums : 0));
    ex.parallel_for(workers, 1, [&](index_t begin, index_t end) {
      for (auto w = begin; w < end; ++w) {
        auto const share = [](index_t tiles, index_t parts, index_t part, index_t width, index_t limit) {
          return std::min(limit, (tiles * part / parts) * width);
        };
        auto const row = share(tiles_m, grid_m, w / grid_n, tuning::tile_rows, m);
        auto const row_end = share(tiles_m, grid_m, w / grid_n + 1, tuning::tile_rows, m);
        auto const column = share(tiles_n, grid_n, w % grid_n, tuning::tile_columns, n);
        auto const column_end = share(tiles_n, grid_n, w % grid_n + 1, tuning::tile_columns, n);
        if (row == row_end || column == column_end) continue;
        auto const part = c.slice(0, row, row_end).slice(1, column, column_end);
        auto const left_part = a.slice(0, row, row_end);
        auto const right_part = b.slice(1, column, column_end);
        if constexpr (!std::same_as<C, float>)
          if (keeps_sums) {
            multiply_in_float(buffers.of(w), part, left_part, right_part, accumulate);
            continue;
          }
        multiply_block(buffers.of(w), part, left_part, right_part, accumulate);
      }
    });
  }

private:
  /// Up to here (a decoder's next token), panels of b would be used too seldom to pay for packing them.
  static constexpr index_t few_rows = 2;

  /// Dot products of rows of a with columns of b, both as they lie in memory: b is read once.
  template <exec::host_space Ex, storage_scalar C, storage_scalar A, storage_scalar B>
  static void multiply_few_rows(Ex& ex, view<C, 2> c, view<A const, 2> a, view<B const, 2> b,
                                bool accumulate) {
    auto const depth = a.extent(1);
    for_rows(ex, c.extent(1), depth, [&](index_t column) {
      auto const* right = b.data() + column * b.stride(1);
      for (index_t row = 0; row < c.extent(0); ++row) {
        auto const* left = a.data() + row * a.stride(0);
        auto const dot =
            sum(depth, [left, right](index_t k) { return widened(left[k]) * widened(right[k]); });
        c(row, column) = C((accumulate ? widened(c(row, column)) : 0.0f) + dot);
      }
    });
  }
};

} // namespace tessera::inline TESSERA_ABI::ops::host_detail

#endif
