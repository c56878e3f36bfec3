/// Token embedding, with learned positions where there are any: out(b, t) = table(tokens(b, t)) +
/// positions(first_position + t).
///
///     ops::embedding(ex, out, tokens, table, positions);
///     ops::embedding_backward(ex, d_table, d_positions, d_out, tokens);
///
/// Cost: forward reads two rows and writes one for each token; backward reads each row of d_out once and
/// touches only the rows of d_table whose tokens occur (all of them where it overwrites). A token's rows are
/// added up in float, in the order of the tokens, before they are rounded to G: the same bits for any number
/// of threads.
#ifndef TESSERA_OPS_EMBEDDING_HPP
#define TESSERA_OPS_EMBEDDING_HPP

#include <tessera/core/scalar.hpp>
#include <tessera/exec/space.hpp>
#include <tessera/ops/shapes.hpp>

namespace tessera::inline TESSERA_ABI::ops {

struct embedding_options {
  index_t first_position = 0; ///< Position of tokens(:, 0); of the next token when decoding with a cache.
};

struct embedding_backward_options {
  bool accumulate_table = false;     ///< Add to d_table instead of overwriting it.
  bool accumulate_positions = false; ///< Add to d_positions instead of overwriting it.
  index_t first_position = 0;
};

namespace detail {

/// Positions [first, first + count) exist in a table of `rows` positions.
inline void require_positions(char const* operation, index_t first, index_t count, index_t rows, site where) {
  if (first < 0 || count > rows || first > rows - count)
    throw size_error("E-ops-010", where, operation, ": positions ", first, " to ", first, " + ", count,
                     " are asked for, there are ", rows);
}

} // namespace detail

/// One implementation a backend: `forward(ex, out, tokens, table, positions, first_position, where)`,
/// `backward(ex, d_table, d_positions, d_out, tokens, options, where)`.
template <class Backend>
struct embedding_on;

/// tokens [B, T], out [B * T, width], table [V, width], positions [P, width] or empty. Throws size_error
/// where shapes do not fit, where a position does not exist or where a token is outside [0, V).
template <exec::space Ex, storage_scalar T>
void embedding(Ex& ex, view<T, 2, typename Ex::memory> out,
               input<std::int32_t, 2, typename Ex::memory> tokens, input<T, 2, typename Ex::memory> table,
               input<T, 2, typename Ex::memory> positions, embedding_options options = {},
               site where = site::here()) {
  constexpr auto name = "embedding";
  require_rows(name, "out", out, {tokens.extent(0) * tokens.extent(1), table.extent(1)}, where);
  require_dense_rows(name, "tokens", tokens, where);
  require_dense_rows(name, "table", table, where);
  require_extents_or_none(name, "positions", positions, {positions.extent(0), table.extent(1)}, where);
  require_dense_rows(name, "positions", positions, where);
  if (positions.data() != nullptr)
    detail::require_positions(name, options.first_position, tokens.extent(1), positions.extent(0), where);
  embedding_on<typename Ex::backend>::forward(ex, out, tokens, table, positions, options.first_position,
                                              where);
}

/// d_out [B * T, width], tokens [B, T], d_table [V, width], d_positions [P, width] or empty.
template <exec::space Ex, storage_scalar G, class T>
  requires storage_scalar<std::remove_const_t<T>>
void embedding_backward(Ex& ex, view<G, 2, typename Ex::memory> d_table,
                        std::type_identity_t<view<G, 2, typename Ex::memory>> d_positions,
                        view<T, 2, typename Ex::memory> d_out,
                        input<std::int32_t, 2, typename Ex::memory> tokens,
                        embedding_backward_options options = {}, site where = site::here()) {
  constexpr auto name = "embedding_backward";
  require_rows(name, "d_out", d_out, {tokens.extent(0) * tokens.extent(1), d_table.extent(1)}, where);
  require_dense_rows(name, "tokens", tokens, where);
  require_dense_rows(name, "d_table", d_table, where);
  require_extents_or_none(name, "d_positions", d_positions, {d_positions.extent(0), d_table.extent(1)},
                          where);
  require_dense_rows(name, "d_positions", d_positions, where);
  if (d_positions.data() != nullptr)
    detail::require_positions(name, options.first_position, tokens.extent(1), d_positions.extent(0), where);
  embedding_on<typename Ex::backend>::backward(
      ex, d_table, d_positions, view<std::remove_const_t<T> const, 2, typename Ex::memory>(d_out), tokens,
      options, where);
}

} // namespace tessera::inline TESSERA_ABI::ops

#include <tessera/ops/host/embedding.hpp>

#endif
