/// The all-to-all between "all heads of my tokens" and "my heads of all tokens", for several arrays in one
/// call. Messages are bytes: arrays of different types share them, each piece at a multiple of 16 bytes.
#ifndef TESSERA_PARALLEL_DETAIL_HEAD_EXCHANGE_HPP
#define TESSERA_PARALLEL_DETAIL_HEAD_EXCHANGE_HPP

#include <vector>

#include <tessera/comm/communicator.hpp>
#include <tessera/core/arena.hpp>
#include <tessera/ops/copy_rows.hpp>
#include <tessera/ops/scale.hpp>
#include <tessera/parallel/detail/head_groups.hpp>

namespace tessera::inline TESSERA_ABI::parallel::detail {

/// Whether an array's heads are those of queries or of keys.
enum class head_kind : std::uint8_t { queries, keys };

/// An array on its way. One side is [B, t, all heads, X] with this rank's tokens, the other [B, T, its heads,
/// X] with all tokens in the order of their positions.
template <storage_scalar E, memory_space M>
struct exchanged_array {
  view<E, 4, M> to;
  view<E const, 4, M> from;
  head_kind kind = head_kind::queries;
  /// On the way back, where key heads are repeated: memory to add them up in, [B, t, K, X].
  view<float, 4, M> sum = {};
};

/// log_sum_exp[B, H, t] as tokens of heads of one number.
template <class T, memory_space M>
constexpr view<T, 4, M> by_tokens(view<T, 3, M> sums) noexcept {
  return {sums.data(),
          {sums.extent(0), sums.extent(2), sums.extent(1), 1},
          {sums.stride(0), sums.stride(2), sums.stride(1), 1}};
}

/// Bytes of a piece of so many elements.
constexpr index_t exchange_piece(index_t count, index_t item) noexcept {
  return (count * item + 15) / 16 * 16;
}

template <exec::space Ex, comm::communicator Comm>
class head_exchange {
  using M = typename Ex::memory;
  template <class E>
  using array = exchanged_array<E, M>;
  template <class E>
  using heads_view = view<E, 4, M>;

public:
  head_exchange(Ex& ex, Comm& comm, arena<M>& memory, head_groups const& groups,
                layout::sequence_shards const& shards, index_t batch, site where)
      : ex_(ex), comm_(comm), memory_(memory), groups_(groups), shards_(shards), batch_(batch),
        where_(where) {}

  /// Each rank's tokens to the ranks that have the heads.
  template <class... E>
  void to_heads(array<E> const&... arrays) {
    arena_scope<M> const scope(memory_);
    auto const& counts = plan(arrays...);
    auto const tokens = shards_.local_length(comm_.rank());
    auto* at = by_tokens_;
    for (int r = 0; r < comm_.size(); ++r) (pack_heads(arrays, r, next(arrays, at, tokens)), ...);
    comm_.all_to_all_v(bytes(by_heads_, counts.of_all), counts.of_all, constant(by_tokens_, counts.of_mine),
                       counts.of_mine, where_);
    at = by_heads_;
    for (int r = 0; r < comm_.size(); ++r)
      (unpack_tokens(arrays, r, next(arrays, at, shards_.local_length(r))), ...);
  }

  /// Each rank's heads to the ranks that have the tokens. Repeated key heads are added up in fp32, in the
  /// order of ranks.
  template <class... E>
  void to_tokens(array<E> const&... arrays) {
    arena_scope<M> const scope(memory_);
    auto const& counts = plan(arrays...);
    auto const tokens = shards_.local_length(comm_.rank());
    auto* at = by_heads_;
    for (int r = 0; r < comm_.size(); ++r)
      (pack_tokens(arrays, r, next(arrays, at, shards_.local_length(r))), ...);
    comm_.all_to_all_v(bytes(by_tokens_, counts.of_mine), counts.of_mine, constant(by_heads_, counts.of_all),
                       counts.of_all, where_);
    (begin_sum(arrays), ...);
    at = by_tokens_;
    for (int r = 0; r < comm_.size(); ++r) (unpack_heads(arrays, r, next(arrays, at, tokens)), ...);
    (end_sum(arrays), ...);
  }

private:
  /// What the messages between this rank's tokens and each rank, and between its heads and each rank, count.
  /// Kept by the space, so that a step allocates nothing.
  struct messages {
    std::vector<index_t> of_mine, of_all;
  };

  static memory_span<std::byte, M> bytes(std::byte* data, std::span<index_t const> counts) {
    index_t sum = 0;
    for (auto count : counts) sum += count;
    return {data, static_cast<std::size_t>(sum)};
  }
  static memory_span<std::byte const, M> constant(std::byte* data, std::span<index_t const> counts) {
    return bytes(data, counts);
  }

  index_t heads(head_kind kind) const {
    return kind == head_kind::queries ? groups_.queries() : groups_.keys();
  }
  template <class E>
  bool sums(array<E> const& a) const {
    return a.kind == head_kind::keys && !groups_.keys_are_divided();
  }

  /// Counts the messages and takes memory for both sides of them.
  template <class... E>
  messages const& plan(array<E> const&... arrays) {
    auto const ranks = comm_.size();
    auto& counts = ex_.template handle<messages>();
    counts.of_mine.resize(static_cast<std::size_t>(ranks));
    counts.of_all.resize(static_cast<std::size_t>(ranks));
    auto const bytes_of = [&](int rank) {
      auto const tokens = batch_ * shards_.local_length(rank);
      return (exchange_piece(tokens * heads(arrays.kind) * arrays.to.extent(3), sizeof(E)) + ...);
    };
    index_t all = 0;
    for (int r = 0; r < ranks; ++r) {
      counts.of_mine[static_cast<std::size_t>(r)] = bytes_of(comm_.rank());
      all += counts.of_all[static_cast<std::size_t>(r)] = bytes_of(r);
    }
    by_tokens_ = memory_.template take<std::byte, 1>({bytes_of(comm_.rank()) * ranks}, where_).data();
    by_heads_ = memory_.template take<std::byte, 1>({all}, where_).data();
    return counts;
  }

  /// The array's piece of a message, which begins at `at`; `at` goes on to the next.
  template <class E>
  heads_view<E> next(array<E> const& a, std::byte*& at, index_t tokens) const {
    heads_view<E> const piece(static_cast<E*>(static_cast<void*>(at)),
                              {batch_, tokens, heads(a.kind), a.to.extent(3)});
    at += exchange_piece(piece.size(), sizeof(E));
    return piece;
  }

  /// Calls body(first of all heads, first of the rank's heads, their number) for neighbours that stay
  /// neighbours.
  template <class Body>
  void for_runs(head_kind kind, int rank, Body&& body) const {
    auto const count = heads(kind);
    if (kind == head_kind::queries) return body(groups_.first_query(rank), index_t{0}, count);
    if (groups_.keys_are_divided()) return body(groups_.key(rank, 0), index_t{0}, count);
    for (index_t i = 0; i < count; ++i) body(groups_.key(rank, i), i, index_t{1});
  }
  /// Calls body(positions, rows of the rank) for each of the rank's ranges.
  template <class Body>
  void for_ranges(int rank, Body&& body) const {
    auto const [first, second] = shards_.positions(rank);
    body(first, layout::range{0, first.size()});
    body(second, layout::range{first.size(), first.size() + second.size()});
  }

  template <class E>
  void pack_heads(array<E> const& a, int rank, heads_view<E> piece) {
    for_runs(a.kind, rank, [&](index_t of_all, index_t of_rank, index_t count) {
      ops::copy_rows(ex_, piece.slice(2, of_rank, of_rank + count), a.from.slice(2, of_all, of_all + count),
                     where_);
    });
  }
  template <class E>
  void unpack_tokens(array<E> const& a, int rank, heads_view<E> piece) {
    for_ranges(rank, [&](layout::range positions, layout::range rows) {
      ops::copy_rows(ex_, a.to.slice(1, positions.begin, positions.end), piece.slice(1, rows.begin, rows.end),
                     where_);
    });
  }
  template <class E>
  void pack_tokens(array<E> const& a, int rank, heads_view<E> piece) {
    for_ranges(rank, [&](layout::range positions, layout::range rows) {
      ops::copy_rows(ex_, piece.slice(1, rows.begin, rows.end),
                     a.from.slice(1, positions.begin, positions.end), where_);
    });
  }
  template <class E>
  void unpack_heads(array<E> const& a, int rank, heads_view<E> piece) {
    for_runs(a.kind, rank, [&](index_t of_all, index_t of_rank, index_t count) {
      auto const part = piece.slice(2, of_rank, of_rank + count);
      if (sums(a))
        ops::add_rows(ex_, a.sum.slice(2, of_all, of_all + count), part, where_);
      else
        ops::copy_rows(ex_, a.to.slice(2, of_all, of_all + count), part, where_);
    });
  }
  template <class E>
  void begin_sum(array<E> const& a) {
    if (sums(a)) ops::fill(ex_, a.sum.template reshape<1>({a.sum.size()}), 0.0f, where_);
  }
  template <class E>
  void end_sum(array<E> const& a) {
    if (sums(a)) ops::copy_rows(ex_, a.to, a.sum, where_);
  }

  Ex& ex_;
  Comm& comm_;
  arena<M>& memory_;
  head_groups groups_;
  layout::sequence_shards shards_;
  index_t batch_;
  site where_;
  std::byte *by_tokens_ = nullptr, *by_heads_ = nullptr; ///< Messages of this rank's tokens, of its heads.
};

} // namespace tessera::inline TESSERA_ABI::parallel::detail

#endif
