/// A block that the first and the last stage of a pipeline hold: the last one's gradients go to the first,
/// which owns it, and the new weights come back; shards to shards, whatever the stage of ZeRO.
#ifndef TESSERA_PARALLEL_DETAIL_SHARED_BLOCK_HPP
#define TESSERA_PARALLEL_DETAIL_SHARED_BLOCK_HPP

#include <algorithm>

#include <tessera/ops/add.hpp>
#include <tessera/parallel/detail/zero_parts.hpp>

namespace tessera::inline TESSERA_ABI::parallel::detail {

/// Gradients of a shared block arrive in pieces of at most so many elements.
template <storage_scalar G>
index_t arriving_elements(unit_part const& part, zero_options const& options) {
  if (!part.trained || !part.given.owned) return 0;
  return (std::min)(part.share.size(),
                    (std::max)(index_t{1}, options.bucket_bytes / static_cast<index_t>(sizeof(G))));
}

template <comm::communicator Comm, exec::space Ex, storage_scalar T, storage_scalar G>
class shared_block {
public:
  using memory = typename Ex::memory;

  /// Throws config_error (E-parallel-010) where the shared unit does not exist.
  shared_block(zero_ranks<Comm> const& ranks, std::vector<unit_part> const& parts,
               zero_options const& options, site where) {
    if (!ranks.shared_block) return;
    auto const unit = ranks.shared_block->unit;
    if (unit >= parts.size() || ranks.shared_block->pipeline == nullptr)
      throw config_error("E-parallel-010", where,
                         "zero: the block that is shared with another stage is unit ", unit, " of ",
                         parts.size(), "; name a unit of the list, and the pipeline's group");
    if (!parts[unit].trained) return;
    part_ = &parts[unit];
    unit_ = unit;
    pipeline_ = ranks.shared_block->pipeline;
    peer_ = ranks.shared_block->peer;
    piece_ = (std::max)(index_t{1}, options.bucket_bytes / static_cast<index_t>(sizeof(G)));
    arriving_ = tensor<G, 1, memory>({arriving_elements<G>(parts[unit], options)},
                                     {options.meter, memory_kind::communication}, where);
  }

  /// Adds the borrower's share of the gradient to the owner's.
  template <class Share>
  void add_up_gradients(Ex& ex, Share&& share, site where) {
    if (part_ == nullptr) return;
    auto const mine = share(unit_);
    auto const all = static_cast<index_t>(mine.size());
    for (index_t begin = 0; begin < all; begin += piece_) {
      auto const length = (std::min)(piece_, all - begin);
      auto const piece = mine.subspan(static_cast<std::size_t>(begin), static_cast<std::size_t>(length));
      if (!part_->given.owned) {
        pipeline_->send(memory_span<G const, memory>(piece), peer_, tag, where);
        continue;
      }
      auto const arrived = arriving_.span().first(static_cast<std::size_t>(length));
      pipeline_->receive(arrived, peer_, tag, where);
      view<G, 1, memory> const sum(piece.data(), {length});
      ops::add(ex, sum, sum, view<G, 1, memory>(arrived.data(), {length}));
    }
  }

  /// The owner's new weights, of this rank's share, to the borrower's.
  void bring_weights(memory_span<T, memory> share, site where) {
    if (part_ == nullptr || share.empty()) return;
    if (part_->given.owned)
      pipeline_->send(memory_span<T const, memory>(share), peer_, tag, where);
    else
      pipeline_->receive(share, peer_, tag, where);
  }

private:
  static constexpr int tag = 32767;

  unit_part const* part_ = nullptr; ///< Null where there is nothing to exchange.
  std::size_t unit_ = no_unit;
  Comm* pipeline_ = nullptr;
  int peer_ = 0;
  index_t piece_ = 1;
  tensor<G, 1, memory> arriving_;
};

} // namespace tessera::inline TESSERA_ABI::parallel::detail

#endif
