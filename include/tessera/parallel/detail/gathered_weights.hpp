/// Stage 3: weights of units gathered before use and given back after it, one unit ahead.
#ifndef TESSERA_PARALLEL_DETAIL_GATHERED_WEIGHTS_HPP
#define TESSERA_PARALLEL_DETAIL_GATHERED_WEIGHTS_HPP

#include <tessera/parallel/detail/zero_parts.hpp>

namespace tessera::inline TESSERA_ABI::parallel::detail {

template <comm::communicator Comm, exec::space Ex, storage_scalar T>
class gathered_weights {
public:
  using memory = typename Ex::memory;

  gathered_weights(Comm& comm, layout::ownership who, std::vector<unit_part> const& parts,
                   zero_options const& options)
      : comm_(comm), who_(who), parts_(parts),
        pool_(weight_shelves(parts, options), {options.meter, memory_kind::communication}),
        entries_(options.stage < 3 ? 0 : parts.size()), counts_(static_cast<std::size_t>(who.ranks)) {}

  /// Starts to gather unit `u` of its shards, unless it is there or on its way.
  void bring(std::size_t u, memory_span<T const, memory> shard, site where) {
    auto& one = entries_[u];
    if (one.block != nullptr) return;
    one.block = pool_.take(parts_[u].size, where);
    if (one.block == nullptr)
      throw config_error("E-parallel-012", where, "lend: no room for the weights of unit ", u,
                         ", for others are still lent; call done(unit) after each forward and backward");
    who_.counts_of(parts_[u].size, counts_);
    one.under_way = comm_.start_all_gather_v(one.block->span(), shard, counts_, where);
  }

  /// The weights of a unit that was brought; they stay until `done` is called as often as `use`.
  memory_span<T const, memory> use(std::size_t u) {
    entries_[u].under_way.wait();
    ++entries_[u].users;
    return entries_[u].block->span();
  }
  void done(std::size_t u) {
    if (--entries_[u].users == 0 && !entries_[u].kept) drop(u);
  }
  /// Whether they stay without users: a tied block, from the unit that borrows it to the backward of its own.
  void keep(std::size_t u, bool kept) { entries_[u].kept = kept; }
  int users(std::size_t u) const { return entries_[u].users; }

  /// Gives back what was brought and is neither used nor kept, except where `wanted(u)`.
  template <std::predicate<std::size_t> Wanted>
  void drop_unused(Wanted&& wanted) {
    for (std::size_t u = 0; u < entries_.size(); ++u)
      if (entries_[u].block != nullptr && entries_[u].users == 0 && !entries_[u].kept && !wanted(u)) drop(u);
  }

private:
  struct entry {
    typename block_pool<T, memory>::block* block = nullptr;
    typename Comm::request under_way;
    int users = 0;
    bool kept = false;
  };

  void drop(std::size_t u) {
    entries_[u].under_way.wait();
    pool_.give_back(*entries_[u].block);
    entries_[u].block = nullptr;
  }

  Comm& comm_;
  layout::ownership who_;
  std::vector<unit_part> const& parts_;
  block_pool<T, memory> pool_; // before the requests: those end while their blocks are still there
  std::vector<entry> entries_;
  std::vector<index_t> counts_;
};

} // namespace tessera::inline TESSERA_ABI::parallel::detail

#endif
