/// Blocks of two arrays (keys and values, or their gradients) that travel round a ring of ranks, each rank
/// sending to the next and receiving from the one before, in two buffers: the block that is held is sent on
/// from one while the next arrives in the other.
#ifndef TESSERA_PARALLEL_DETAIL_BLOCK_RING_HPP
#define TESSERA_PARALLEL_DETAIL_BLOCK_RING_HPP

#include <tessera/comm/communicator.hpp>
#include <tessera/core/arena.hpp>
#include <tessera/parallel/context_options.hpp>

namespace tessera::inline TESSERA_ABI::parallel::detail {

/// Step i = 1, 2, ... exchanges the block of rank `rank - i` (modulo ranks): pass_on(i) sends the held one
/// and begins to receive that, arrive() ends it.
template <comm::communicator Comm, storage_scalar E, memory_space M>
class block_ring {
public:
  static constexpr index_t scratch_bytes(context_sizes const& sizes, layout::sequence_shards const& shards) {
    return 2 * arena<M>::template bytes_for<E>(items(sizes, shards.longest()));
  }

  block_ring(Comm& comm, arena<M>& memory, context_sizes const& sizes, layout::sequence_shards const& shards,
             int tag, site where)
      : comm_(comm), sizes_(sizes), shards_(shards), tag_(tag), where_(where) {
    for (auto& buffer : buffers_)
      buffer = memory.template take<E, 1>({items(sizes, shards.longest())}, where);
  }

  /// The rank whose block step i brings here.
  int owner(int step) const noexcept { return (comm_.rank() - step + 2 * comm_.size()) % comm_.size(); }

  /// The held block, of `rank`, as its two arrays [B, its tokens, K, D].
  view<E, 4, M> first(int rank) const { return part(rank, 0); }
  view<E, 4, M> second(int rank) const { return part(rank, 1); }
  /// Both in one.
  view<E, 1, M> both(int rank) const { return {buffers_[held_].data(), {items(rank)}}; }

  /// Sends the held block, of rank owner(sent), to the next rank, and begins to receive that of
  /// owner(received). Until arrive() the held block is lent: it may be read.
  void pass_on(int sent, int received) {
    auto const next = (comm_.rank() + 1) % comm_.size(), previous = owner(1);
    memory_span<E, M> const out(buffers_[1 - held_].data(), static_cast<std::size_t>(items(owner(received))));
    memory_span<E const, M> const in(buffers_[held_].data(), static_cast<std::size_t>(items(owner(sent))));
    going_ = comm_.start_send(in, next, tag_, where_);
    coming_ = comm_.start_receive(out, previous, tag_, where_);
    (void)coming_.test(); // some communicators begin only when they are asked
  }

  /// The block that was on its way is the held one; the other buffer is free.
  void arrive() {
    coming_.wait();
    going_.wait();
    held_ = 1 - held_;
  }

private:
  static constexpr index_t items(context_sizes const& sizes, index_t tokens) noexcept {
    return 2 * sizes.batch * tokens * sizes.key_heads * sizes.head_width;
  }
  index_t items(int rank) const { return items(sizes_, shards_.local_length(rank)); }

  view<E, 4, M> part(int rank, int which) const {
    auto const half = items(rank) / 2;
    return {buffers_[held_].data() + which * half,
            {sizes_.batch, shards_.local_length(rank), sizes_.key_heads, sizes_.head_width}};
  }

  Comm& comm_;
  context_sizes sizes_;
  layout::sequence_shards shards_;
  int tag_;
  site where_;
  view<E, 1, M> buffers_[2];
  int held_ = 0;
  typename Comm::request going_, coming_;
};

} // namespace tessera::inline TESSERA_ABI::parallel::detail

#endif
