/// What the layers of a model ask of the ranks that share it: which part of each matrix this rank holds
/// (tensor parallelism), which rows of the residual stream (sequence parallelism), which tokens of each
/// sample (context parallelism), and the few sums over ranks between two products. Layers know no
/// communicator; they are templates over such a group. `one_rank`, the default, costs nothing;
/// parallel/model_group.hpp is the group over a mesh.
///
///     nn::llama_block<Ex, T, G> block(config, 0);                       // all of it is here
///     nn::llama_block<Ex, T, G, Group> part(config, 0, group);          // this rank's part of it
///
/// The residual stream of a micro-batch is [tokens, width] for the tokens that this rank holds. Under
/// sequence parallelism each tensor rank keeps `rows(tokens)` of it between the products, where norms,
/// dropout and residual sums act, and all rows only while a product runs.
#ifndef TESSERA_NN_RANK_GROUP_HPP
#define TESSERA_NN_RANK_GROUP_HPP

#include <tessera/core/arena.hpp>
#include <tessera/nn/tensor_part.hpp>
#include <tessera/ops/attention.hpp>
#include <tessera/ops/linear_cross_entropy.hpp>
#include <tessera/ops/token_positions.hpp>

namespace tessera::inline TESSERA_ABI::nn {

/// The sizes of one call of a group's attention.
struct attention_sizes {
  index_t batch = 0;
  index_t sequence_length = 0; ///< Of whole samples.
  index_t heads = 0;           ///< On this rank, like key_heads.
  index_t key_heads = 0;
  index_t head_width = 0;
};

/// The ranks that share a model, as one of them sees it: a small value that is copied into each layer.
///
/// Semantics; n = tensor_ranks(), r = tensor_rank(), M = Ex::memory. Whatever communicates is called by every
/// rank of the group, in the same order.
/// - alone(): this rank has the whole model and whole samples, whatever their length.
/// - tensor_ranks(), tensor_rank(), sequence_parallel(): 0 <= r < n; the ranks that hold parts of the same
///   matrices, and whether they share rows too.
/// - local_sequence(whole): tokens of a sample of `whole` tokens that this rank holds, and
///   positions(whole): where in it they stand. The same on all tensor ranks.
/// - rows(tokens): this rank's rows of the residual stream of `tokens` local tokens: shard_of(tokens, n, r)
///   under sequence parallelism, all of them without.
/// - gather(ex, room, local): a view of all rows, of which `local` are this rank's: `local` itself where it
///   holds all (`room` is not touched), otherwise `room`, filled from all ranks. `local` may be its own part
///   of `room`.
/// - reduce(ex, local, full): this rank's rows of the sum of all ranks' `full`, into `local`, which may be
///   its own part of `full`, and is `full` itself where this rank has all rows. What else `full` holds is
///   undefined afterwards. gather and reduce are each other's adjoint.
/// - attention(ex, out, log_sum_exp, q, k, v, whole, memory), attention_backward(...): causal ops::attention
///   and its backward over whole samples of `whole` tokens, of which the views hold this rank's. Takes up to
///   attention_scratch_bytes<T, M>(sizes) and attention_backward_scratch_bytes<T, M>(sizes) from `memory` and
///   gives them back.
template <class P, class Ex>
concept rank_group = std::copyable<P> && exec::space<Ex> &&
    requires(P const& group, Ex& ex, index_t count, view<float, 2, typename Ex::memory> rows,
             view<float, 4, typename Ex::memory> heads, view<float, 3, typename Ex::memory> sums,
             arena<typename Ex::memory>& memory, attention_sizes const& sizes) {
  { group.alone() } -> std::same_as<bool>;
  { group.tensor_ranks() } -> std::same_as<int>;
  { group.tensor_rank() } -> std::same_as<int>;
  { group.sequence_parallel() } -> std::same_as<bool>;
  { group.local_sequence(count) } -> std::same_as<index_t>;
  { group.positions(count) } -> std::same_as<ops::token_positions>;
  { group.rows(count) } -> std::same_as<layout::range>;
  { group.gather(ex, rows, rows) } -> std::same_as<view<float, 2, typename Ex::memory>>;
  group.reduce(ex, rows, rows);
  group.attention(ex, heads, sums, heads, heads, heads, count, memory);
  group.attention_backward(ex, heads, heads, heads, heads, heads, heads, heads, heads, sums, count, memory);
  { group.template attention_scratch_bytes<float, typename Ex::memory>(sizes) } -> std::same_as<index_t>;
  {
    group.template attention_backward_scratch_bytes<float, typename Ex::memory>(sizes)
    } -> std::same_as<index_t>;
};

template <class Group>
constexpr tensor_part tensor_part_of(Group const& group) noexcept {
  return {group.tensor_ranks(), group.tensor_rank(), group.sequence_parallel()};
}

/// Where the local tokens of samples of `whole` tokens stand. A decoder, which has them all, goes on behind
/// those that it fed before.
template <class Group>
constexpr ops::token_positions positions_of(Group const& group, index_t whole, index_t fed_before) {
  auto positions = group.positions(whole);
  positions.first += fed_before;
  return positions;
}

/// One rank holds the whole model.
struct one_rank {
  static constexpr bool alone() noexcept { return true; }
  static constexpr int tensor_ranks() noexcept { return 1; }
  static constexpr int tensor_rank() noexcept { return 0; }
  static constexpr bool sequence_parallel() noexcept { return false; }
  static constexpr index_t local_sequence(index_t whole) noexcept { return whole; }
  static constexpr ops::token_positions positions(index_t) noexcept { return {}; }
  static constexpr layout::range rows(index_t tokens) noexcept { return {0, tokens}; }

  template <exec::space Ex, storage_scalar T>
  static view<T, 2, typename Ex::memory> gather(Ex&, view<T, 2, typename Ex::memory>,
                                                view<T, 2, typename Ex::memory> local) noexcept {
    return local;
  }
  template <exec::space Ex, storage_scalar T>
  static void reduce(Ex&, view<T, 2, typename Ex::memory>, view<T, 2, typename Ex::memory>) noexcept {}

  template <exec::space Ex, storage_scalar T>
  static void attention(Ex& ex, view<T, 4, typename Ex::memory> out,
                        view<float, 3, typename Ex::memory> log_sum_exp, input<T, 4, typename Ex::memory> q,
                        input<T, 4, typename Ex::memory> k, input<T, 4, typename Ex::memory> v, index_t,
                        arena<typename Ex::memory>&) {
    ops::attention(ex, out, log_sum_exp, q, k, v);
  }
  template <exec::space Ex, storage_scalar T>
  static void
  attention_backward(Ex& ex, view<T, 4, typename Ex::memory> dq, view<T, 4, typename Ex::memory> dk,
                     view<T, 4, typename Ex::memory> dv, input<T, 4, typename Ex::memory> d_out,
                     input<T, 4, typename Ex::memory> q, input<T, 4, typename Ex::memory> k,
                     input<T, 4, typename Ex::memory> v, input<T, 4, typename Ex::memory> out,
                     input<float, 3, typename Ex::memory> log_sum_exp, index_t, arena<typename Ex::memory>&) {
    ops::attention_backward(ex, dq, dk, dv, d_out, q, k, v, out, log_sum_exp);
  }
  template <storage_scalar T, memory_space M>
  static constexpr index_t attention_scratch_bytes(attention_sizes const&) noexcept {
    return 0;
  }
  template <storage_scalar T, memory_space M>
  static constexpr index_t attention_backward_scratch_bytes(attention_sizes const&) noexcept {
    return 0;
  }

  template <memory_space M>
  static constexpr ops::whole_vocabulary statistics_merge(arena<M>&) noexcept {
    return {};
  }
  template <memory_space M>
  static constexpr index_t statistics_merge_bytes(index_t) noexcept {
    return 0;
  }
};

} // namespace tessera::inline TESSERA_ABI::nn

#endif
