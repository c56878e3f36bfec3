/// Attention over a sequence that is spread over ranks, by exchanging heads against sequence: each rank gives
/// up all but its share of the heads, gets all tokens of those, attends to the whole sequence, and gives the
/// results back (Jacobs et al., "DeepSpeed-Ulysses", 2023).
///
///     parallel::context_options const options{.sequence_length = 8192};
///     arena<> memory(parallel::exchange_attention_backward_scratch_bytes<bf16>(
///         {.batch = b, .heads = h, .key_heads = k, .head_width = d}, options.shards(comm.size())));
///     parallel::exchange_attention(ex, comm, out, log_sum_exp, q, k, v, options, memory);
///     parallel::exchange_attention_backward(ex, comm, dq, dk, dv, d_out, q, k, v, out, log_sum_exp, options,
///                                           memory);
///
/// Any assignment of positions will do: tokens are put into the order of their positions on the way. Query
/// heads must divide among the ranks. Key heads need not: where ranks share one, each gets a copy, and its
/// gradients are added up in fp32, in the order of ranks.
///
/// Cost: two calls of all_to_all_v forward, two backward. With E = B t D elements of one head of this rank's
/// tokens, h = H / n and k key heads a rank (K / n, or 1 where n is a multiple of K), each other rank is sent
/// (h + 2 k) E of q, k, v and is sent back h E of out; backward 3 h + 2 k there (nothing gathered is kept
/// from the forward) and h + 2 k back; each time with log_sum_exp, B t h floats. Nothing hides them.
#ifndef TESSERA_PARALLEL_SEQUENCE_EXCHANGE_HPP
#define TESSERA_PARALLEL_SEQUENCE_EXCHANGE_HPP

#include <tessera/ops/attention.hpp>
#include <tessera/parallel/detail/context_shapes.hpp>
#include <tessera/parallel/detail/head_exchange.hpp>

namespace tessera::inline TESSERA_ABI::parallel {

namespace detail {

/// What both ways have on the side of the heads, for plans: elements of one array of query heads and of one
/// of key heads, and queries.
struct exchange_extent {
  index_t query_items, key_items, queries;

  constexpr exchange_extent(context_sizes const& sizes, int ranks, index_t tokens) {
    head_groups const groups{sizes.heads, sizes.key_heads, ranks};
    queries = sizes.batch * tokens * groups.queries();
    query_items = queries * sizes.head_width;
    key_items = sizes.batch * tokens * groups.keys() * sizes.head_width;
  }
};

/// The messages of one exchange, on both sides: so many arrays of query heads and of key heads.
template <storage_scalar T>
constexpr index_t exchange_message_bytes(context_sizes const& sizes, layout::sequence_shards const& shards,
                                         int queries, int keys) {
  exchange_extent const most(sizes, shards.ranks, shards.longest());
  return 2 *
         arena<>::bytes_for<std::byte>(shards.ranks * (queries * exchange_piece(most.query_items, sizeof(T)) +
                                                       keys * exchange_piece(most.key_items, sizeof(T)) +
                                                       exchange_piece(most.queries, sizeof(float))));
}

template <storage_scalar T, memory_space M>
void require_exchange(char const* call, context_options const& options, int rank, int ranks,
                      view<T const, 4, M> q, view<T const, 4, M> k, view<T const, 4, M> v,
                      view<T const, 4, M> out, view<float const, 3, M> log_sum_exp, site where) {
  require_context<T, M>(call, options, rank, ranks, q, k, v, out, log_sum_exp, where);
  if (q.extent(2) % ranks != 0)
    throw config_error("E-parallel-063", where, call, ": ", q.extent(2), " heads do not divide among ", ranks,
                       " context ranks; take a number of ranks that divides them, or the ring "
                       "(context_form::ring), which takes any");
}

} // namespace detail

/// Bytes that `exchange_attention` takes from its arena on any rank: an upper bound, the same on all of them.
/// One rank alone takes nothing.
template <storage_scalar T>
constexpr index_t exchange_attention_scratch_bytes(context_sizes const& sizes,
                                                   layout::sequence_shards const& shards) {
  if (shards.ranks == 1 || sizes.heads == 0) return 0;
  detail::exchange_extent const whole(sizes, shards.ranks, shards.length);
  return 2 * arena<>::bytes_for<T>(whole.query_items) + 2 * arena<>::bytes_for<T>(whole.key_items) +
         arena<>::bytes_for<float>(whole.queries) + detail::exchange_message_bytes<T>(sizes, shards, 1, 2);
}

/// The same of `exchange_attention_backward`.
template <storage_scalar T>
constexpr index_t exchange_attention_backward_scratch_bytes(context_sizes const& sizes,
                                                            layout::sequence_shards const& shards) {
  if (shards.ranks == 1 || sizes.heads == 0) return 0;
  detail::exchange_extent const whole(sizes, shards.ranks, shards.length);
  auto const keys = sizes.batch * shards.longest() * sizes.key_heads * sizes.head_width;
  return 4 * arena<>::bytes_for<T>(whole.query_items) + 4 * arena<>::bytes_for<T>(whole.key_items) +
         arena<>::bytes_for<float>(whole.queries) + 2 * arena<>::bytes_for<float>(keys) +
         detail::exchange_message_bytes<T>(sizes, shards, 3, 2);
}

/// out[B, t, H, D] and log_sum_exp[B, H, t] for the t positions that this rank holds,
/// options.shards(comm.size()).positions(comm.rank()), from its q[B, t, H, D], k and v[B, t, K, D]; query
/// head h reads key head h / (H / K). Views may be strided with a last stride of 1; log_sum_exp is
/// contiguous. Called by every rank, with the same options and sizes. Throws config_error (E-parallel-060,
/// -063), size_error (E-parallel-061, -062, E-ops-001 to -003), out_of_memory where the arena is smaller than
/// planned, and what the communicator throws.
template <exec::space Ex, comm::communicator Comm, storage_scalar T>
  requires std::same_as<typename Comm::bulk_memory, typename Ex::memory>
void exchange_attention(Ex& ex, Comm& comm, view<T, 4, typename Ex::memory> out,
                        view<float, 3, typename Ex::memory> log_sum_exp, input<T, 4, typename Ex::memory> q,
                        input<T, 4, typename Ex::memory> k, input<T, 4, typename Ex::memory> v,
                        context_options const& options, arena<typename Ex::memory>& memory,
                        site where = site::here()) {
  using M = typename Ex::memory;
  using detail::head_kind;
  auto const ranks = comm.size();
  detail::require_exchange<T, M>("exchange_attention", options, comm.rank(), ranks, q, k, v, out, log_sum_exp,
                                 where);
  ops::attention_options const all{.scale = options.scale, .causal = options.causal, .first_query = 0};
  if (ranks == 1) return ops::attention(ex, out, log_sum_exp, q, k, v, all, where);
  if (q.extent(2) == 0) return;

  auto const batch = q.extent(0), tokens = options.sequence_length, width = q.extent(3);
  detail::head_groups const groups{q.extent(2), k.extent(2), ranks};
  extents<4> const query_sizes{batch, tokens, groups.queries(), width};
  extents<4> const key_sizes{batch, tokens, groups.keys(), width};
  arena_scope<M> const scope(memory);
  detail::head_exchange<Ex, Comm> exchange(ex, comm, memory, groups, options.shards(ranks), batch, where);
  auto const my_q = memory.template take<T, 4>(query_sizes, where);
  auto const my_out = memory.template take<T, 4>(query_sizes, where);
  auto const my_k = memory.template take<T, 4>(key_sizes, where);
  auto const my_v = memory.template take<T, 4>(key_sizes, where);
  auto const my_sums = memory.template take<float, 3>({batch, groups.queries(), tokens}, where);

  using array = detail::exchanged_array<T, M>;
  using sums = detail::exchanged_array<float, M>;
  exchange.to_heads(array{my_q, q}, array{my_k, k, head_kind::keys}, array{my_v, v, head_kind::keys});
  ops::attention(ex, my_out, my_sums, my_q, my_k, my_v, all, where);
  exchange.to_tokens(array{out, my_out}, sums{detail::by_tokens(log_sum_exp), detail::by_tokens(my_sums)});
}

/// The gradients dq[B, t, H, D], dk and dv[B, t, K, D] of `exchange_attention`, overwritten, given d_out and
/// what the forward read and wrote, with the same options.
template <exec::space Ex, comm::communicator Comm, storage_scalar T>
  requires std::same_as<typename Comm::bulk_memory, typename Ex::memory>
void exchange_attention_backward(Ex& ex, Comm& comm, view<T, 4, typename Ex::memory> dq,
                                 view<T, 4, typename Ex::memory> dk, view<T, 4, typename Ex::memory> dv,
                                 input<T, 4, typename Ex::memory> d_out, input<T, 4, typename Ex::memory> q,
                                 input<T, 4, typename Ex::memory> k, input<T, 4, typename Ex::memory> v,
                                 input<T, 4, typename Ex::memory> out,
                                 input<float, 3, typename Ex::memory> log_sum_exp,
                                 context_options const& options, arena<typename Ex::memory>& memory,
                                 site where = site::here()) {
  using M = typename Ex::memory;
  using detail::head_kind;
  auto const ranks = comm.size();
  auto const* const call = "exchange_attention_backward";
  detail::require_exchange<T, M>(call, options, comm.rank(), ranks, q, k, v, out, log_sum_exp, where);
  detail::require_gradients<T, M>(call, dq, dk, dv, d_out, q, k, where);
  ops::attention_options const all{.scale = options.scale, .causal = options.causal, .first_query = 0};
  if (ranks == 1)
    return ops::attention_backward(ex, dq, dk, dv, d_out, q, k, v, out, log_sum_exp, all, where);
  if (q.extent(2) == 0) return;

  auto const batch = q.extent(0), tokens = options.sequence_length, width = q.extent(3);
  detail::head_groups const groups{q.extent(2), k.extent(2), ranks};
  extents<4> const query_sizes{batch, tokens, groups.queries(), width};
  extents<4> const key_sizes{batch, tokens, groups.keys(), width};
  arena_scope<M> const scope(memory);
  detail::head_exchange<Ex, Comm> exchange(ex, comm, memory, groups, options.shards(ranks), batch, where);
  auto const of_queries = [&] { return memory.template take<T, 4>(query_sizes, where); };
  auto const of_keys = [&] { return memory.template take<T, 4>(key_sizes, where); };
  auto const my_q = of_queries(), my_out = of_queries(), my_d_out = of_queries(), my_dq = of_queries();
  auto const my_k = of_keys(), my_v = of_keys(), my_dk = of_keys(), my_dv = of_keys();
  auto const my_sums = memory.template take<float, 3>({batch, groups.queries(), tokens}, where);
  view<float, 4, M> dk_sum, dv_sum;
  if (!groups.keys_are_divided()) {
    dk_sum = memory.template take<float, 4>(k.extents(), where);
    dv_sum = memory.template take<float, 4>(k.extents(), where);
  }

  using array = detail::exchanged_array<T, M>;
  using sums = detail::exchanged_array<float, M>;
  exchange.to_heads(array{my_q, q}, array{my_k, k, head_kind::keys}, array{my_v, v, head_kind::keys},
                    array{my_out, out}, array{my_d_out, d_out},
                    sums{detail::by_tokens(my_sums), detail::by_tokens(log_sum_exp)});
  ops::attention_backward(ex, my_dq, my_dk, my_dv, my_d_out, my_q, my_k, my_v, my_out, my_sums, all, where);
  exchange.to_tokens(array{dq, my_dq}, array{dk, my_dk, head_kind::keys, dk_sum},
                     array{dv, my_dv, head_kind::keys, dv_sum});
}

} // namespace tessera::inline TESSERA_ABI::parallel

#endif
