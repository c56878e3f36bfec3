/// The ranks of a mesh that share a model's matrices (tensor), its rows between them (sequence parallelism)
/// and each sequence (context), as the layers see them: an nn::rank_group.
///
///     partition::mesh<comm::mpi> mesh(world, {.data = 2, .tensor = 4});
///     parallel::model_group group(mesh, {.sequence_parallel = true});
///     auto units = nn::make_transformer<Ex, bf16, float>(config, group, {0, nn::unit_count(config)});
///
/// Said in placements along the tensor axis, entering a product whose matrix is cut by rows is `invariant ->
/// replicate` (nothing; backward: all_reduce) or, with sequence parallelism, `shard<0> -> replicate`
/// (all_gather; backward: reduce_scatter). Leaving one whose matrix is cut by columns is `partial ->
/// invariant` (all_reduce; backward: nothing) or `partial -> shard<0>` (reduce_scatter; backward:
/// all_gather).
///
/// Cost: a block sends two all_reduce of [tokens, width] forward and two backward. With sequence parallelism
/// an all_gather and a reduce_scatter stand in place of each, which together send as much, and the backward
/// gathers the two inputs of products once more instead of keeping them. Sums are taken in rank order.
#ifndef TESSERA_PARALLEL_MODEL_GROUP_HPP
#define TESSERA_PARALLEL_MODEL_GROUP_HPP

#include <tessera/nn/rank_group.hpp>
#include <tessera/parallel/context_attention.hpp>
#include <tessera/partition/redistribute.hpp>

namespace tessera::inline TESSERA_ABI::parallel {

/// The same on all ranks.
struct model_group_options {
  bool sequence_parallel = false; ///< Ignored by a tensor axis of one rank, which has all rows.
  context_form form = context_form::ring;
  layout::sequence_assignment assignment = layout::sequence_assignment::zigzag;
};

/// Borrows the mesh, which outlives it and all its copies.
template <comm::communicator Comm>
class model_group {
public:
  explicit model_group(partition::mesh<Comm>& mesh, model_group_options options = {},
                       site where = site::here())
      : mesh_(&mesh), tensor_(&mesh.along(layout::axis::tensor, where)),
        context_(&mesh.along(layout::axis::context, where)), options_(options) {}

  bool alone() const noexcept { return tensor_->size() == 1 && context_->size() == 1; }
  int tensor_ranks() const noexcept { return tensor_->size(); }
  int tensor_rank() const noexcept { return tensor_->rank(); }
  bool sequence_parallel() const noexcept { return options_.sequence_parallel && tensor_ranks() > 1; }

  index_t local_sequence(index_t whole) const { return shards(whole).local_length(context_->rank()); }
  ops::token_positions positions(index_t whole) const {
    auto const here = shards(whole).positions(context_->rank());
    return {.first = here.first.begin, .split = here.first.size(), .second = here.second.begin};
  }
  layout::range rows(index_t tokens) const {
    return sequence_parallel() ? layout::shard_of(tokens, tensor_ranks(), tensor_rank())
                               : layout::range{0, tokens};
  }

  template <exec::space Ex, storage_scalar T>
  view<T, 2, typename Ex::memory> gather(Ex& ex, view<T, 2, typename Ex::memory> room,
                                         view<T, 2, typename Ex::memory> local) const {
    if (!sequence_parallel()) return local;
    auto const whole = room.extents();
    partition::redistribute(ex, *mesh_, placed<partition::replicate>(whole, room),
                            placed<partition::shard<0>>(whole, local));
    return room;
  }
  template <exec::space Ex, storage_scalar T>
  void reduce(Ex& ex, view<T, 2, typename Ex::memory> local, view<T, 2, typename Ex::memory> full) const {
    if (tensor_ranks() == 1) return;
    auto const whole = full.extents();
    auto const sums = placed<partition::partial<>>(whole, full);
    if (sequence_parallel())
      partition::redistribute(ex, *mesh_, placed<partition::shard<0>>(whole, local), sums);
    else
      partition::redistribute(ex, *mesh_, placed<partition::invariant>(whole, local), sums);
  }

  template <exec::space Ex, storage_scalar T>
  void attention(Ex& ex, view<T, 4, typename Ex::memory> out, view<float, 3, typename Ex::memory> log_sum_exp,
                 input<T, 4, typename Ex::memory> q, input<T, 4, typename Ex::memory> k,
                 input<T, 4, typename Ex::memory> v, index_t whole,
                 arena<typename Ex::memory>& memory) const {
    if (context_->size() == 1)
      ops::attention(ex, out, log_sum_exp, q, k, v);
    else
      context_attention(ex, *context_, options_.form, out, log_sum_exp, q, k, v, context_of(whole), memory);
  }
  template <exec::space Ex, storage_scalar T>
  void attention_backward(Ex& ex, view<T, 4, typename Ex::memory> dq, view<T, 4, typename Ex::memory> dk,
                          view<T, 4, typename Ex::memory> dv, input<T, 4, typename Ex::memory> d_out,
                          input<T, 4, typename Ex::memory> q, input<T, 4, typename Ex::memory> k,
                          input<T, 4, typename Ex::memory> v, input<T, 4, typename Ex::memory> out,
                          input<float, 3, typename Ex::memory> log_sum_exp, index_t whole,
                          arena<typename Ex::memory>& memory) const {
    if (context_->size() == 1)
      ops::attention_backward(ex, dq, dk, dv, d_out, q, k, v, out, log_sum_exp);
    else
      context_attention_backward(ex, *context_, options_.form, dq, dk, dv, d_out, q, k, v, out, log_sum_exp,
                                 context_of(whole), memory);
  }
  template <storage_scalar T, memory_space M>
  index_t attention_scratch_bytes(nn::attention_sizes const& sizes) const {
    if (context_->size() == 1) return 0;
    return context_attention_scratch_bytes<T>(options_.form, sizes_of(sizes), shards(sizes.sequence_length));
  }
  template <storage_scalar T, memory_space M>
  index_t attention_backward_scratch_bytes(nn::attention_sizes const& sizes) const {
    if (context_->size() == 1) return 0;
    return context_attention_backward_scratch_bytes<T>(options_.form, sizes_of(sizes),
                                                       shards(sizes.sequence_length));
  }

  /// The ranks' statistics are gathered, and merged in the order of the ranks.
  template <memory_space M>
  auto statistics_merge(arena<M>& memory) const {
    return [tensor = tensor_, &memory]<exec::space Ex>(Ex& ex, view<float, 2, M> statistics) {
      if (tensor->size() == 1) return;
      arena_scope const scope(memory);
      auto const all =
          memory.template take<float, 3>({tensor->size(), statistics.extent(0), statistics.extent(1)});
      tensor->all_gather(all.span(), statistics.span());
      ops::merge_softmax_statistics(ex, statistics, all);
    };
  }
  template <memory_space M>
  index_t statistics_merge_bytes(index_t rows) const {
    constexpr auto width = ops::softmax_statistics_row::width;
    return tensor_ranks() == 1 ? 0 : arena<M>::template bytes_for<float>(tensor_ranks() * rows * width);
  }

private:
  template <partition::placement_type P, storage_scalar T, memory_space M>
  auto placed(extents<2> const& whole, view<T, 2, M> local) const {
    return partition::partitioned<partition::placed<layout::axis::tensor, P>>(mesh_->place(), whole, local);
  }

  layout::sequence_shards shards(index_t whole) const noexcept {
    return context_of(whole).shards(context_->size());
  }
  context_options context_of(index_t whole) const noexcept {
    return {.sequence_length = whole, .assignment = options_.assignment};
  }
  static context_sizes sizes_of(nn::attention_sizes const& sizes) noexcept {
    return {sizes.batch, sizes.heads, sizes.key_heads, sizes.head_width};
  }

  partition::mesh<Comm>* mesh_;
  Comm* tensor_;
  Comm* context_;
  model_group_options options_;
};

} // namespace tessera::inline TESSERA_ABI::parallel

#endif
