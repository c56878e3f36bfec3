/// Attention over a sequence that is spread over ranks: queries stay, keys and values travel round a ring,
/// one block on its way while the one before is worked on (Liu, Zaharia and Abbeel, "Ring attention with
/// blockwise transformers for near-infinite context", 2023). What comes out is attention over the whole
/// sequence, for the positions that each rank holds.
///
///     parallel::context_options const options{.sequence_length = 8192};        // causal, zig-zag
///     arena<> memory(parallel::ring_attention_backward_scratch_bytes<bf16>(
///         {.batch = b, .heads = h, .key_heads = k, .head_width = d}, options.shards(comm.size())));
///     parallel::ring_attention(ex, comm, out, log_sum_exp, q, k, v, options, memory);
///     parallel::ring_attention_backward(ex, comm, dq, dk, dv, d_out, q, k, v, out, log_sum_exp, options,
///                                       memory);
///
/// Each block is met by one call of ops::attention on just the rows that the causal mask lets through
/// (layout::sequence_shards::block), and partial results are merged in fp32 (ops/merge_attention.hpp).
/// Backward recomputes scores from the final log_sum_exp; gradients of keys and values travel behind their
/// block, summed in fp32, the ranks' summands in the order of the ring, so results do not depend on timing.
///
/// Cost for n ranks: n - 1 messages from each of 2 B t K D elements (t: the block's tokens), hidden behind
/// the arithmetic where the communicator works by itself; backward the same again and n - 1 messages of as
/// many floats. Every rank of `comm` calls it, with the same options and sizes.
#ifndef TESSERA_PARALLEL_RING_ATTENTION_HPP
#define TESSERA_PARALLEL_RING_ATTENTION_HPP

#include <tessera/ops/attention.hpp>
#include <tessera/ops/copy_rows.hpp>
#include <tessera/ops/merge_attention.hpp>
#include <tessera/ops/scale.hpp>
#include <tessera/parallel/detail/block_ring.hpp>
#include <tessera/parallel/detail/context_shapes.hpp>

namespace tessera::inline TESSERA_ABI::parallel {

namespace detail {

/// Tags of the ring's messages, below those that applications begin with.
inline constexpr int ring_of_keys = 1, ring_of_gradients = 2;

} // namespace detail

/// Bytes that `ring_attention` takes from its arena on any rank: an upper bound, the same on all of them. One
/// rank alone takes nothing.
template <storage_scalar T>
constexpr index_t ring_attention_scratch_bytes(context_sizes const& sizes,
                                               layout::sequence_shards const& shards) {
  if (shards.ranks == 1) return 0;
  auto const queries = sizes.batch * shards.longest() * sizes.heads, items = queries * sizes.head_width;
  auto const blocks =
      2 * arena<>::bytes_for<T>(2 * sizes.batch * shards.longest() * sizes.key_heads * sizes.head_width);
  return blocks + arena<>::bytes_for<float>(items) + arena<>::bytes_for<T>(items) +
         arena<>::bytes_for<float>(queries);
}

/// The same of `ring_attention_backward`.
template <storage_scalar T>
constexpr index_t ring_attention_backward_scratch_bytes(context_sizes const& sizes,
                                                        layout::sequence_shards const& shards) {
  if (shards.ranks == 1) return 0;
  auto const block = sizes.batch * shards.longest() * sizes.key_heads * sizes.head_width;
  return ring_attention_scratch_bytes<T>(sizes, shards) + 2 * arena<>::bytes_for<float>(2 * block) +
         2 * arena<>::bytes_for<T>(block);
}

/// out[B, t, H, D] and log_sum_exp[B, H, t] for the t positions that this rank holds,
/// options.shards(comm.size()).positions(comm.rank()), from its q[B, t, H, D], k and v[B, t, K, D]; query
/// head h reads key head h / (H / K). Views may be strided with a last stride of 1; log_sum_exp is
/// contiguous. Throws config_error (E-parallel-060), size_error (E-parallel-061, -062, E-ops-001 to -003),
/// out_of_memory where the arena is smaller than planned, and what the communicator throws.
template <exec::space Ex, comm::communicator Comm, storage_scalar T>
  requires std::same_as<typename Comm::bulk_memory, typename Ex::memory>
void ring_attention(Ex& ex, Comm& comm, view<T, 4, typename Ex::memory> out,
                    view<float, 3, typename Ex::memory> log_sum_exp, input<T, 4, typename Ex::memory> q,
                    input<T, 4, typename Ex::memory> k, input<T, 4, typename Ex::memory> v,
                    context_options const& options, arena<typename Ex::memory>& memory,
                    site where = site::here()) {
  using M = typename Ex::memory;
  auto const rank = comm.rank(), ranks = comm.size();
  detail::require_context<T, M>("ring_attention", options, rank, ranks, q, k, v, out, log_sum_exp, where);
  ops::attention_options const own{.scale = options.scale, .causal = options.causal, .first_query = 0};
  if (ranks == 1) return ops::attention(ex, out, log_sum_exp, q, k, v, own, where);

  ops::attention_options const whole{.scale = options.scale, .causal = false};
  auto const shards = options.shards(ranks);
  auto const batch = q.extent(0), tokens = q.extent(1), heads = q.extent(2), width = q.extent(3);
  arena_scope<M> const scope(memory);
  detail::block_ring<Comm, T, M> keys(comm, memory, {batch, heads, k.extent(2), width}, shards,
                                      detail::ring_of_keys, where);
  auto const sum = memory.template take<float, 4>(q.extents(), where);
  auto const part = memory.template take<T, 1>({q.size()}, where);
  auto const part_sums = memory.template take<float, 1>({batch * heads * tokens}, where);

  ops::copy_rows(ex, keys.first(rank), k, where);
  ops::copy_rows(ex, keys.second(rank), v, where);
  keys.pass_on(0, 1);
  ops::attention(ex, out, log_sum_exp, q, k, v, own, where);
  ops::copy_rows(ex, sum, out, where);
  for (int step = 1; step < ranks; ++step) {
    keys.arrive();
    if (step + 1 < ranks) keys.pass_on(step, step + 1);
    auto const owner = keys.owner(step);
    auto const block = shards.block(rank, owner, options.causal);
    if (block.empty()) continue;
    auto const [from, to] = block.queries;
    view<T, 4, M> const of_block(part.data(), {batch, to - from, heads, width});
    view<float, 3, M> const sums_of_block(part_sums.data(), {batch, heads, to - from});
    ops::attention(ex, of_block, sums_of_block, q.slice(1, from, to),
                   keys.first(owner).slice(1, block.keys.begin, block.keys.end),
                   keys.second(owner).slice(1, block.keys.begin, block.keys.end), whole, where);
    ops::merge_attention(ex, sum.slice(1, from, to), log_sum_exp.slice(2, from, to), of_block, sums_of_block,
                         where);
  }
  ops::copy_rows(ex, out, sum, where);
}

/// The gradients dq[B, t, H, D], dk and dv[B, t, K, D] of `ring_attention`, overwritten, given d_out and what
/// the forward read and wrote, with the same options.
template <exec::space Ex, comm::communicator Comm, storage_scalar T>
  requires std::same_as<typename Comm::bulk_memory, typename Ex::memory>
void ring_attention_backward(Ex& ex, Comm& comm, view<T, 4, typename Ex::memory> dq,
                             view<T, 4, typename Ex::memory> dk, view<T, 4, typename Ex::memory> dv,
                             input<T, 4, typename Ex::memory> d_out, input<T, 4, typename Ex::memory> q,
                             input<T, 4, typename Ex::memory> k, input<T, 4, typename Ex::memory> v,
                             input<T, 4, typename Ex::memory> out,
                             input<float, 3, typename Ex::memory> log_sum_exp, context_options const& options,
                             arena<typename Ex::memory>& memory, site where = site::here()) {
  using M = typename Ex::memory;
  auto const rank = comm.rank(), ranks = comm.size();
  detail::require_context<T, M>("ring_attention_backward", options, rank, ranks, q, k, v, out, log_sum_exp,
                                where);
  detail::require_gradients<T, M>("ring_attention_backward", dq, dk, dv, d_out, q, k, where);
  ops::attention_options const own{.scale = options.scale, .causal = options.causal, .first_query = 0};
  if (ranks == 1)
    return ops::attention_backward(ex, dq, dk, dv, d_out, q, k, v, out, log_sum_exp, own, where);

  ops::attention_options const whole{.scale = options.scale, .causal = false};
  auto const shards = options.shards(ranks);
  auto const batch = q.extent(0), tokens = q.extent(1), heads = q.extent(2), width = q.extent(3);
  context_sizes const sizes{batch, heads, k.extent(2), width};
  arena_scope<M> const scope(memory);
  detail::block_ring<Comm, T, M> keys(comm, memory, sizes, shards, detail::ring_of_keys, where);
  detail::block_ring<Comm, float, M> gradients(comm, memory, sizes, shards, detail::ring_of_gradients, where);
  auto const dq_sum = memory.template take<float, 4>(q.extents(), where);
  auto const dq_part = memory.template take<T, 1>({q.size()}, where);
  auto const block_size = batch * shards.longest() * k.extent(2) * width;
  auto const dk_part = memory.template take<T, 1>({block_size}, where);
  auto const dv_part = memory.template take<T, 1>({block_size}, where);
  auto const later_sums = memory.template take<float, 1>({batch * heads * tokens}, where);

  ops::copy_rows(ex, keys.first(rank), k, where);
  ops::copy_rows(ex, keys.second(rank), v, where);
  keys.pass_on(0, 1);
  ops::attention_backward(ex, dq, dk, dv, d_out, q, k, v, out, log_sum_exp, own, where);
  ops::copy_rows(ex, dq_sum, dq, where);
  for (int step = 1; step < ranks; ++step) {
    keys.arrive();
    if (step + 1 < ranks) keys.pass_on(step, step + 1);
    auto const owner = keys.owner(step);
    auto const block = shards.block(rank, owner, options.causal);
    auto const [from, to] = block.queries;
    auto const [begin, end] = block.keys;
    view<T, 4, M> const dq_block(dq_part.data(), {batch, to - from, heads, width});
    extents<4> const of_keys{batch, end - begin, k.extent(2), width};
    view<T, 4, M> const dk_block(dk_part.data(), of_keys), dv_block(dv_part.data(), of_keys);
    if (!block.empty()) {
      // The operation reads sums without gaps.
      view<float, 4, M> const gathered(later_sums.data(), {batch, heads, 1, to - from});
      view<float const, 4, M> const among(log_sum_exp.address(0, 0, from), {batch, heads, 1, to - from},
                                          {heads * tokens, tokens, tokens, 1});
      ops::copy_rows(ex, gathered, among, where);
      ops::attention_backward(ex, dq_block, dk_block, dv_block, d_out.slice(1, from, to),
                              q.slice(1, from, to), keys.first(owner).slice(1, begin, end),
                              keys.second(owner).slice(1, begin, end), out.slice(1, from, to),
                              view<float, 3, M>(later_sums.data(), {batch, heads, to - from}), whole, where);
      ops::add_rows(ex, dq_sum.slice(1, from, to), dq_block, where);
    }
    if (step == 1)
      ops::fill(ex, gradients.both(owner), 0.0f, where); // this rank is the first that the block comes to
    else
      gradients.arrive();
    if (!block.empty()) {
      ops::add_rows(ex, gradients.first(owner).slice(1, begin, end), dk_block, where);
      ops::add_rows(ex, gradients.second(owner).slice(1, begin, end), dv_block, where);
    }
    gradients.pass_on(step, step + 1);
  }
  ops::copy_rows(ex, dq, dq_sum, where);
  gradients.arrive(); // those of this rank's own keys, from all others
  ops::add_rows(ex, gradients.first(rank), dk, where);
  ops::add_rows(ex, gradients.second(rank), dv, where);
  ops::copy_rows(ex, dk, gradients.first(rank), where);
  ops::copy_rows(ex, dv, gradients.second(rank), where);
}

} // namespace tessera::inline TESSERA_ABI::parallel

#endif
