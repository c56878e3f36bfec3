/// What both forms of context parallelism check before anything is sent.
#ifndef TESSERA_PARALLEL_DETAIL_CONTEXT_SHAPES_HPP
#define TESSERA_PARALLEL_DETAIL_CONTEXT_SHAPES_HPP

#include <tessera/core/scalar.hpp>
#include <tessera/ops/shapes.hpp>
#include <tessera/parallel/context_options.hpp>

namespace tessera::inline TESSERA_ABI::parallel::detail {

/// The tensors' extents are those of this rank's part of the sequence, and the options make sense. Throws
/// config_error, size_error.
template <storage_scalar T, memory_space M>
void require_context(char const* call, context_options const& options, int rank, int ranks,
                     view<T const, 4, M> q, view<T const, 4, M> k, view<T const, 4, M> v,
                     view<T const, 4, M> out, view<float const, 3, M> log_sum_exp, site where) {
  if (options.sequence_length < 0)
    throw config_error("E-parallel-060", where, call,
                       ": say how long the whole sequence is, in context_options::sequence_length; it is ",
                       options.sequence_length);
  auto const mine = options.shards(ranks).local_length(rank, where);
  if (q.extent(1) != mine)
    throw size_error("E-parallel-061", where, call, ": rank ", rank, " of ", ranks, " holds ", mine,
                     " of the ", options.sequence_length, " positions (", name_of(options.assignment),
                     "), q has ", q.extent(1), "; context_options::shards says which rows are whose");
  auto const heads = q.extent(2), key_heads = k.extent(2);
  if (key_heads < 1 ? heads != 0 : heads % key_heads != 0)
    throw size_error("E-parallel-062", where, call, ": ", heads, " query heads do not divide among ",
                     key_heads, " key heads");
  extents<4> const keys{q.extent(0), mine, key_heads, q.extent(3)};
  ops::require_dense_rows(call, "q", q, where);
  ops::require_rows(call, "k", k, keys, where);
  ops::require_rows(call, "v", v, keys, where);
  ops::require_rows(call, "out", out, q.extents(), where);
  ops::require_extents(call, "log_sum_exp", log_sum_exp, {q.extent(0), heads, mine}, where);
  ops::require_contiguous(call, "log_sum_exp", log_sum_exp, where);
}

template <storage_scalar T, memory_space M>
void require_gradients(char const* call, view<T const, 4, M> dq, view<T const, 4, M> dk,
                       view<T const, 4, M> dv, view<T const, 4, M> d_out, view<T const, 4, M> q,
                       view<T const, 4, M> k, site where) {
  ops::require_rows(call, "dq", dq, q.extents(), where);
  ops::require_rows(call, "dk", dk, k.extents(), where);
  ops::require_rows(call, "dv", dv, k.extents(), where);
  ops::require_rows(call, "d_out", d_out, q.extents(), where);
}

} // namespace tessera::inline TESSERA_ABI::parallel::detail

#endif
