/// Token embedding, with learned positions where there are any: out(b, t) = table(tokens(b, t)) +
/// positions(position of t).
///
///     ops::embedding(ex, out, tokens, table, positions);
///     ops::embedding_backward(ex, d_table, d_positions, d_out, tokens);
///     ops::embedding(ex, out, tokens, rows_of_this_rank, {}, {.first_token = 1000, .vocabulary = 50257});
///
/// The table may be a slice of the vocabulary's: a token that stands outside it embeds to zeros (the sum over
/// the ranks that hold the slices is the embedding) and adds nothing in the backward.
///
/// Cost: forward reads two rows and writes one for each token; backward reads each row of d_out once and
/// touches only the rows of d_table whose tokens occur (all of them where it overwrites). A token's rows are
/// added up in float, in the order of the tokens, before they are rounded to G: the same bits for any number
/// of threads.
#ifndef TESSERA_OPS_EMBEDDING_HPP
#define TESSERA_OPS_EMBEDDING_HPP

#include <tessera/core/scalar.hpp>
#include <tessera/exec/space.hpp>
#include <tessera/ops/detail/vocabulary_slice.hpp>
#include <tessera/ops/shapes.hpp>
#include <tessera/ops/token_positions.hpp>

namespace tessera::inline TESSERA_ABI::ops {

struct embedding_options {
  token_positions positions = {}; ///< Of tokens(:, t); when decoding with a cache, they go on behind it.
  index_t first_token = 0;        ///< Whose row is the table's first.
  index_t vocabulary = 0;         ///< Tokens lie in [0, vocabulary); 0: the table's rows are all there are.
};

struct embedding_backward_options {
  bool accumulate_table = false;     ///< Add to d_table instead of overwriting it.
  bool accumulate_positions = false; ///< Add to d_positions instead of overwriting it.
  token_positions positions = {};    ///< As in the forward, like those below.
  index_t first_token = 0;
  index_t vocabulary = 0;
};

namespace detail {

/// The tokens' positions exist in a table of `rows` positions.
inline void require_positions(char const* operation, token_positions positions, index_t count, index_t rows,
                              site where) {
  if (!positions.fit(count, rows))
    throw size_error("E-ops-010", where, operation, ": positions ", positions.text(count),
                     " are asked for, there are ", rows, ", each of which can be asked for once");
}

} // namespace detail

/// One implementation a backend: `forward(ex, out, tokens, table, slice, positions, places, where)` and
/// `backward(ex, d_table, slice, d_positions, d_out, tokens, options, where)`, where `slice` is a
/// detail::vocabulary_slice and `places` are token_positions.
template <class Backend>
struct embedding_on;

/// tokens [B, T], out [B * T, width], table [V, width] or a slice of it, positions [P, width] or empty.
/// Throws size_error where shapes do not fit, where a position does not exist or where a token is outside the
/// vocabulary. The output's storage type need not be the tables'.
template <exec::space Ex, storage_scalar T, scalar_input<2, typename Ex::memory> Table>
void embedding(Ex& ex, view<T, 2, typename Ex::memory> out,
               input<std::int32_t, 2, typename Ex::memory> tokens, Table const& rows,
               input<value_of<Table>, 2, typename Ex::memory> positions, embedding_options options = {},
               site where = site::here()) {
  constexpr auto name = "embedding";
  auto const table = reading<2, typename Ex::memory>(rows);
  require_rows(name, "out", out, {tokens.extent(0) * tokens.extent(1), table.extent(1)}, where);
  require_dense_rows(name, "tokens", tokens, where);
  require_dense_rows(name, "table", table, where);
  require_extents_or_none(name, "positions", positions, {positions.extent(0), table.extent(1)}, where);
  require_dense_rows(name, "positions", positions, where);
  if (positions.data() != nullptr)
    detail::require_positions(name, options.positions, tokens.extent(1), positions.extent(0), where);
  detail::vocabulary_slice const slice(name, options.first_token, table.extent(0), options.vocabulary, where);
  embedding_on<typename Ex::backend>::forward(ex, out, tokens, table, slice, positions, options.positions,
                                              where);
}

/// d_out [B * T, width], tokens [B, T], d_table [V, width] or the same slice of it, d_positions [P, width] or
/// empty.
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
    detail::require_positions(name, options.positions, tokens.extent(1), d_positions.extent(0), where);
  detail::vocabulary_slice const slice(name, options.first_token, d_table.extent(0), options.vocabulary,
                                       where);
  embedding_on<typename Ex::backend>::backward(
      ex, d_table, slice, d_positions, view<std::remove_const_t<T> const, 2, typename Ex::memory>(d_out),
      tokens, options, where);
}

} // namespace tessera::inline TESSERA_ABI::ops

#include <tessera/ops/host/embedding.hpp>

#endif
