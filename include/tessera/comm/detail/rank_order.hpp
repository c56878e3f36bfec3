/// A reduction in rank_order or as a binary_tree: two exchanges with a sum between them, for transports of
/// any memory. Each rank adds up one slice, or, where the vector is short, all of it.
#ifndef TESSERA_COMM_DETAIL_RANK_ORDER_HPP
#define TESSERA_COMM_DETAIL_RANK_ORDER_HPP

#include <tessera/comm/detail/combine.hpp>

namespace tessera::inline TESSERA_ABI::comm::detail {

/// Element at which slice `rank` of n elements over `ranks` begins.
constexpr index_t slice_begin(index_t n, int ranks, int rank) noexcept {
  auto const extra = n % ranks;
  return n / ranks * rank + (rank < extra ? rank : extra);
}

/// Up to here an all_reduce in a fixed order sends whole vectors to all, one message instead of two.
inline constexpr index_t whole_vector_bytes = 2048;

/// What rank `rank` does in the call `c`.
struct rank_order_steps {
  call const& c;
  int rank, ranks;

  /// One message to all instead of two: every rank adds up everything.
  bool whole() const noexcept {
    return c.what != collective::reduce_scatter && c.in_items * bytes_of(c.type) <= whole_vector_bytes;
  }
  index_t slice(int of) const noexcept {
    return slice_begin(c.in_items, ranks, of + 1) - slice_begin(c.in_items, ranks, of);
  }
  /// How many elements this rank adds up.
  index_t items() const noexcept {
    if (whole()) return c.in_items;
    return c.what == collective::reduce_scatter ? c.out_items : slice(rank);
  }
  index_t pieces_bytes() const noexcept { return ranks * items() * bytes_of(c.type); }

  /// Brings to `pieces` what the ranks have of this rank's items. `sends` and `receives` have room for a
  /// count of each rank, and live as long as the steps.
  transfer exchange(void* pieces, index_t* sends, index_t* receives) const noexcept {
    auto step = transfer_of(c);
    step.out = pieces;
    step.root = -1;
    step.in_counts = step.out_counts = nullptr;
    step.what = whole() ? collective::all_gather : collective::all_to_all;
    if (whole() || (c.what == collective::reduce_scatter && c.in_counts == nullptr)) return step;
    for (int r = 0; r < ranks; ++r) {
      sends[r] = c.in_counts != nullptr ? c.in_counts[r] : slice(r);
      receives[r] = items();
    }
    step.in_counts = sends;
    step.out_counts = receives;
    return step;
  }
  /// Adds them up: into this rank's part of the output, or over the first piece where it has no output.
  combine_step sum(void* pieces) const noexcept {
    combine_step step{.out = c.out, .pieces = pieces, .n = items(), .stride = items(), .ranks = ranks};
    if (c.what == collective::reduce && rank != c.root)
      step.out = pieces;
    else if (c.what != collective::reduce_scatter && !whole())
      step.out = at(c.out, slice_begin(c.in_items, ranks, rank) * bytes_of(c.type));
    step.operation = c.operation;
    step.order = c.order;
    step.where = c.where;
    return step;
  }
  /// Whether the slices must still be brought together.
  bool collects() const noexcept { return c.what != collective::reduce_scatter && !whole(); }
  transfer collect(void* pieces, index_t const* sends) const noexcept {
    auto step = transfer_of(c);
    step.what = c.what == collective::reduce ? collective::gather : collective::all_gather;
    step.in = sum(pieces).out;
    step.out = c.what == collective::reduce && rank != c.root ? nullptr : c.out;
    step.count = items();
    // Equal slices need no counts, and libraries are better at those.
    step.in_counts = step.out_counts = c.in_items % ranks == 0 ? nullptr : sends;
    return step;
  }
};

} // namespace tessera::inline TESSERA_ABI::comm::detail

#endif
