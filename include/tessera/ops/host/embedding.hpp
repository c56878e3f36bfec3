/// embedding on the host. The backward sorts the token numbers (a counting sort), so that each row of the
/// table is summed in float and written once; the threads share the columns, which balances any distribution
/// of tokens.
#ifndef TESSERA_OPS_HOST_EMBEDDING_HPP
#define TESSERA_OPS_HOST_EMBEDDING_HPP

#include <tessera/ops/embedding.hpp>
#include <tessera/ops/host/detail/convert.hpp>
#include <tessera/ops/host/detail/loops.hpp>

namespace tessera::inline TESSERA_ABI::ops {

template <>
struct embedding_on<exec::host_backend> {
  template <exec::host_space Ex, storage_scalar T, storage_scalar Table>
  static void forward(Ex& ex, view<T, 2> out, view<std::int32_t const, 2> tokens, view<Table const, 2> table,
                      detail::vocabulary_slice slice, view<Table const, 2> positions, token_positions places,
                      site where) {
    check("embedding", tokens, slice, where);
    auto const length = tokens.extent(1), width = table.extent(1);
    host_detail::for_rows(ex, out.extent(0), width, [=](index_t row) {
      auto const t = row % length;
      auto const at = slice.place_of(tokens(row / length, t));
      auto* y = out.data() + row * out.stride(0);
      auto const* x = at < 0 ? nullptr : table.data() + at * table.stride(0); // another slice's, or ours
      auto const* p =
          positions.data() == nullptr ? nullptr : positions.data() + places(t) * positions.stride(0);
      if (x == nullptr && p == nullptr) return host_detail::fill_row(y, width, 0.0f);
      if (x == nullptr || p == nullptr) return host_detail::convert(y, x == nullptr ? p : x, width);
      TESSERA_SIMD()
      for (index_t i = 0; i < width; ++i) store(y[i], static_cast<float>(x[i]) + static_cast<float>(p[i]));
    });
  }

  template <exec::host_space Ex, storage_scalar G, storage_scalar T>
  static void backward(Ex& ex, view<G, 2> d_table, detail::vocabulary_slice slice, view<G, 2> d_positions,
                       view<T const, 2> d_out, view<std::int32_t const, 2> tokens,
                       embedding_backward_options const& options, site where) {
    check("embedding_backward", tokens, slice, where);
    auto const rows = d_out.extent(0), length = tokens.extent(1), classes = d_table.extent(0),
               width = d_out.extent(1);

    // Rows sorted by their token's row of the table, in their own order within it: those of row v are
    // order[first[v], first[v + 1]).
    auto* first = ex.template handle<exec::scratch<starts>>().template take<index_t>(classes + 2, where);
    auto* order = ex.template handle<exec::scratch<sorted>>().template take<index_t>(rows, where);
    for (index_t v = 0; v < classes + 2; ++v) first[v] = 0;
    auto const class_of = [=](index_t row) { return slice.place_of(tokens(row / length, row % length)); };
    for (index_t row = 0; row < rows; ++row)
      if (auto const v = class_of(row); v >= 0) ++first[v + 2];
    for (index_t v = 2; v < classes + 2; ++v) first[v] += first[v - 1];
    for (index_t row = 0; row < rows; ++row)
      if (auto const v = class_of(row); v >= 0) order[first[v + 1]++] = row;

    auto* sums = ex.template handle<exec::scratch<totals>>().template take<float>(width, where);
    constexpr index_t granule = 32; // columns: whole cache lines
    auto const granules = (width + granule - 1) / granule;
    ex.parallel_for(granules, host_detail::grain / (granule * (rows + 1)) + 1, [=](index_t from, index_t to) {
      auto const begin = from * granule, end = to * granule < width ? to * granule : width;
      auto const add_rows = [=](G* out, index_t count, bool accumulate, auto row_of) {
        if (count == 0 && accumulate) return;
        for (auto i = begin; i < end; ++i) sums[i] = accumulate ? static_cast<float>(out[i]) : 0.0f;
        for (index_t k = 0; k < count; ++k) {
          auto const* dy = d_out.data() + row_of(k) * d_out.stride(0);
          TESSERA_SIMD()
          for (auto i = begin; i < end; ++i) sums[i] += static_cast<float>(dy[i]);
        }
        TESSERA_SIMD()
        for (auto i = begin; i < end; ++i) store(out[i], sums[i]);
      };
      for (index_t v = 0; v < classes; ++v)
        add_rows(d_table.data() + v * d_table.stride(0), first[v + 1] - first[v], options.accumulate_table,
                 [=, start = order + first[v]](index_t k) { return start[k]; });
      if (d_positions.data() == nullptr) return;
      for (index_t p = 0; p < d_positions.extent(0); ++p) {
        auto const t = options.positions.token_at(p, length);
        add_rows(d_positions.data() + p * d_positions.stride(0), t >= 0 ? tokens.extent(0) : 0,
                 options.accumulate_positions, [=](index_t b) { return b * length + t; });
      }
    });
  }

private:
  struct starts {};
  struct sorted {};
  struct totals {};

  static void check(char const* operation, view<std::int32_t const, 2> tokens, detail::vocabulary_slice slice,
                    site where) {
    for (index_t b = 0; b < tokens.extent(0); ++b)
      for (index_t t = 0; t < tokens.extent(1); ++t)
        if (auto const token = tokens(b, t); !slice.known(token))
          throw size_error("E-ops-011", where, operation, ": the token at (", b, ", ", t, ") is ", token,
                           ", must lie in [0, ", slice.vocabulary, ")");
  }
};

} // namespace tessera::inline TESSERA_ABI::ops

#endif
