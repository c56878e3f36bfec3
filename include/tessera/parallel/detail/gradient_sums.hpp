/// Gradients from where a backward writes them to this rank's share of their sum: over micro-batches, over
/// tensor ranks that hold summands, over the gradient ranks, while backward goes on.
#ifndef TESSERA_PARALLEL_DETAIL_GRADIENT_SUMS_HPP
#define TESSERA_PARALLEL_DETAIL_GRADIENT_SUMS_HPP

#include <algorithm>

#include <tessera/ops/add.hpp>
#include <tessera/ops/scale.hpp>
#include <tessera/parallel/buckets.hpp>
#include <tessera/parallel/detail/request_queue.hpp>
#include <tessera/parallel/detail/tensor_sums.hpp>
#include <tessera/parallel/detail/zero_parts.hpp>

namespace tessera::inline TESSERA_ABI::parallel::detail {

/// Where the gradients that stay until the update stand, one after another.
inline std::vector<layout::range> gradient_places(std::vector<unit_part> const& parts, int stage) {
  std::vector<layout::range> places;
  index_t end = 0;
  for (auto const& part : parts) {
    auto const kept = kept_gradients_of(part, stage).size();
    places.push_back({end, end + kept});
    end += kept;
  }
  return places;
}

/// The messages of stage 0.
template <storage_scalar G>
std::vector<bucket> gradient_buckets(std::span<layout::range const> places, zero_options const& options) {
  return buckets_of(places, (std::max)(index_t{1}, options.bucket_bytes / static_cast<index_t>(sizeof(G))));
}

template <comm::communicator Comm, exec::space Ex, storage_scalar G>
class gradient_sums {
public:
  using memory = typename Ex::memory;
  using span = memory_span<G, memory>;

  /// `zeroed`: a unit whose block is written to by units of other ranks too, so that it has to begin as
  /// zeros; or no_unit.
  gradient_sums(zero_ranks<Comm> const& ranks, layout::ownership who, std::vector<unit_part> const& parts,
                zero_options const& options, std::size_t zeroed, site where)
      : comm_(ranks.gradients), who_(who), parts_(parts), options_(options), zeroed_(zeroed),
        tensor_(ranks.tensor, parts, where),
        pool_(gradient_shelves(parts, options), {options.meter, memory_kind::communication}),
        entries_(parts.size()), under_way_(options.in_flight), counts_(static_cast<std::size_t>(who.ranks)) {
    auto const places = gradient_places(parts, options.stage);
    for (std::size_t u = 0; u < parts.size(); ++u) {
      entries_[u].place = places[u];
      entries_[u].stack.reserve(stack_depth(options.micro_batches));
    }
    kept_ = tensor<G, 1, memory>({places.empty() ? 0 : places.back().end},
                                 {options.meter, memory_kind::gradients}, where);
    if (options.stage == 0) buckets_ = gradient_buckets<G>(places, options);
  }

  /// The block that unit `u`'s gradients are written to now.
  span lend(Ex& ex, std::size_t u, index_t micro_batch, site where) {
    auto& one = entries_[u];
    if (!one.open) open(ex, u, micro_batch, where);
    if (is_stacked(parts_[u], options_) && one.micro_batch != micro_batch)
      throw config_error("E-parallel-013", where, "the gradients of unit ", u, " of micro-batch ",
                         micro_batch, " begin before those of micro-batch ", one.micro_batch,
                         " are ready, and the reproducible mode adds them up one by one; choose a schedule "
                         "whose backwards come in one part, one after another");
    return written(u);
  }

  /// Unit `u`'s gradients of one micro-batch are there. Throws config_error (E-parallel-003) for a unit that
  /// is not awaited.
  void ready(Ex& ex, std::size_t u, bool last, site where) {
    auto& one = entries_[u];
    if (one.ready)
      throw config_error("E-parallel-003", where, "gradients_ready(", u, ") of ", entries_.size(),
                         " units: the last micro-batch of this step has been there already");
    if (!one.open) open(ex, u, one.micro_batches, where, true); // nothing wrote to it
    one.open = false;
    one.ready = last;
    ++one.micro_batches;
    if (!parts_[u].trained)
      release(one);
    else if (is_stacked(parts_[u], options_))
      add_up_stack(ex, u, last, where);
    else if (last || parts_[u].pooled)
      reduce(ex, u, where);
    under_way_.drive();
  }
  bool is_ready(std::size_t u) const { return entries_[u].ready; }
  index_t micro_batches(std::size_t u) const { return entries_[u].micro_batches; }

  /// Waits for everything that is under way.
  void finish(Ex& ex) {
    while (!under_way_.empty()) finish_oldest(ex);
  }

  /// This rank's share of unit `u`'s sum, once it is finished.
  span share(std::size_t u) {
    auto const all = part_of(kept_.span(), entries_[u].place);
    if (!parts_[u].trained) return all; // nothing
    return options_.stage >= 2 ? all : part_of(all, parts_[u].share);
  }

  void begin_step() {
    for (auto& one : entries_) {
      one.open = one.ready = one.filled = false;
      one.micro_batches = 0;
    }
    next_bucket_ = 0;
  }

private:
  using block = typename block_pool<G, memory>::block;
  struct entry {
    layout::range place;       ///< In what stays until the update.
    std::vector<block*> stack; ///< What is being written on top; null: the unit's own place.
    bool open = false;         ///< Lent, and not ready yet.
    bool filled = false;       ///< The place holds something of this step.
    bool ready = false;        ///< Of the last micro-batch.
    index_t micro_batches = 0; ///< Ready so far in this step.
    index_t micro_batch = 0;   ///< Of the block that is open.
  };
  /// What a request carries: the sum for a shard, out of a block of the pool; or something that needs no
  /// more than waiting.
  struct cargo {
    std::size_t unit = no_unit;
    block* from = nullptr;
    bool adds = false;
  };

  static span part_of(span all, layout::range part) {
    return all.subspan(static_cast<std::size_t>(part.begin), static_cast<std::size_t>(part.size()));
  }
  static view<G, 1, memory> flat(span all) { return {all.data(), {static_cast<index_t>(all.size())}}; }
  span at(std::size_t u, block* which) {
    return which != nullptr ? which->span() : part_of(kept_.span(), entries_[u].place);
  }
  span written(std::size_t u) { return at(u, entries_[u].stack.back()); }

  /// Blocks of the pool begin as zeros, and units add to them; a unit's own place is overwritten by the first
  /// micro-batch, unless that has nothing to write.
  void open(Ex& ex, std::size_t u, index_t micro_batch, site where, bool unwritten = false) {
    auto& one = entries_[u];
    auto const stacked = is_stacked(parts_[u], options_);
    auto const own = !parts_[u].pooled && (!stacked || one.stack.empty());
    if (own) {
      if (one.stack.empty()) one.stack.push_back(nullptr);
      if (!one.filled && (unwritten || u == zeroed_)) clear(ex, u);
      one.filled = true;
    } else {
      one.stack.push_back(take(ex, u, where));
      clear(ex, u);
    }
    one.open = true;
    one.micro_batch = micro_batch;
  }
  void clear(Ex& ex, std::size_t u) { ops::fill(ex, flat(written(u)), 0); }

  block* take(Ex& ex, std::size_t u, site where) {
    for (;;) {
      if (auto* const one = pool_.take(parts_[u].size, where)) return one;
      if (under_way_.empty())
        throw config_error("E-parallel-012", where, "lend: no room for the gradients of unit ", u,
                           ", for others are still being written; call gradients_ready(unit) after each "
                           "backward, or plan for more with .open_units, or .micro_batches in the "
                           "reproducible mode");
      finish_oldest(ex);
    }
  }
  void release(entry& one) {
    for (auto* each : one.stack)
      if (each != nullptr) pool_.give_back(*each);
    one.stack.clear();
  }

  /// The tree over micro-batches: a sum of 2^k of them waits for the next one of as many. At the end the
  /// smaller sums go to the larger ones.
  void add_up_stack(Ex& ex, std::size_t u, bool last, site where) {
    auto& one = entries_[u];
    for (auto n = one.micro_batches; n % 2 == 0; n /= 2) merge(ex, u);
    if (!last) return;
    while (one.stack.size() > 1) merge(ex, u);
    reduce(ex, u, where);
  }
  void merge(Ex& ex, std::size_t u) {
    auto& stack = entries_[u].stack;
    auto* const later = stack.back();
    stack.pop_back();
    auto const sum = flat(written(u));
    ops::add(ex, sum, sum, flat(at(u, later)));
    pool_.give_back(*later);
  }

  void reduce(Ex& ex, std::size_t u, site where) {
    auto& one = entries_[u];
    tensor_.add_up(written(u), u, where);
    if (parts_[u].pooled) {
      make_room(ex);
      auto* const from = one.stack.back();
      one.stack.clear();
      auto const whole = from->span(), own = part_of(whole, parts_[u].share);
      auto const adds = one.filled;
      one.filled = true;
      under_way_.push(comm_.start_reduce_scatter_v(adds ? own : share(u), memory_span<G const, memory>(whole),
                                                   counts_of(u), how(), where),
                      {u, from, adds});
      return;
    }
    one.stack.clear();
    if (options_.stage == 1) {
      make_room(ex);
      under_way_.push(comm_.start_reduce_scatter_v(
                          share(u), memory_span<G const, memory>(part_of(kept_.span(), one.place)),
                          counts_of(u), how(), where),
                      {});
    }
    for (; next_bucket_ < buckets_.size() && all_ready(buckets_[next_bucket_]); ++next_bucket_) {
      make_room(ex);
      under_way_.push(
          comm_.start_all_reduce(part_of(kept_.span(), buckets_[next_bucket_].elements), how(), where), {});
    }
  }
  bool all_ready(bucket const& b) const {
    for (auto u = b.first_unit; u < b.end_unit; ++u)
      if (!entries_[u].ready && parts_[u].trained) return false;
    return true;
  }

  comm::reduce_options how() const {
    return {.order = options_.reproducible ? comm::summation::binary_tree : options_.order};
  }
  std::span<index_t const> counts_of(std::size_t u) {
    who_.counts_of(parts_[u].size, counts_);
    return counts_;
  }
  void make_room(Ex& ex) {
    while (under_way_.full()) finish_oldest(ex);
  }
  void finish_oldest(Ex& ex) {
    auto const brought = under_way_.wait_for_oldest();
    if (brought.from == nullptr) return;
    if (brought.adds) {
      auto const sum = flat(share(brought.unit));
      ops::add(ex, sum, sum, flat(part_of(brought.from->span(), parts_[brought.unit].share)));
    }
    pool_.give_back(*brought.from);
  }

  Comm& comm_;
  layout::ownership who_;
  std::vector<unit_part> const& parts_;
  zero_options const& options_;
  std::size_t zeroed_;
  tensor_sums<Comm, G, memory> tensor_;
  tensor<G, 1, memory> kept_; ///< Blocks up to stage 1, shards from stage 2 on.
  block_pool<G, memory> pool_;
  std::vector<entry> entries_;
  std::vector<bucket> buckets_;
  std::size_t next_bucket_ = 0; ///< The next one to be reduced in this step.
  request_queue<typename Comm::request, cargo> under_way_;
  std::vector<index_t> counts_;
};

} // namespace tessera::inline TESSERA_ABI::parallel::detail

#endif
