/// Which positions of a sequence each rank of a context-parallel group holds, and what causal attention
/// leaves to do between two of them. Arithmetic only.
///
///     layout::sequence_shards shards{.length = 8192, .ranks = 4};        // zig-zag
///     auto mine = shards.positions(rank);            // two ranges, the earlier one first
///     auto rows = shards.local_length(rank);         // local row t is position mine.at(t)
///     shards.causal_pairs(rank);                     // pairs of a query and a key that it sees
///
/// contiguous: rank r of n holds part r of n. Causal work then grows with the rank: the last of n ranks has
/// 2 - 1/n times the mean. zigzag: the sequence is cut into 2 n chunks and rank r holds chunks r and
/// 2 n - 1 - r, so that an early chunk and a late one make up for each other: with equal chunks all ranks
/// have exactly the same work. Chunks are those of `shard_of`: lengths differ by one at most, so local
/// lengths differ by two at most, and where a sequence is shorter than its number of chunks some are empty.
///
/// (The zig-zag assignment is what public long-context trainers use with ring attention: Liu, Zaharia and
/// Abbeel, "Ring attention with blockwise transformers", 2023.)
#ifndef TESSERA_LAYOUT_SEQUENCE_SHARDS_HPP
#define TESSERA_LAYOUT_SEQUENCE_SHARDS_HPP

#include <tessera/layout/shard.hpp>

namespace tessera::inline TESSERA_ABI::layout {

enum class sequence_assignment : std::uint8_t { contiguous, zigzag };

constexpr char const* name_of(sequence_assignment how) noexcept {
  return how == sequence_assignment::zigzag ? "zigzag" : "contiguous";
}

/// One rank's positions, in order: local rows 0 .. first.size() - 1 are those of `first`, the rows after
/// them those of `second`.
struct sequence_positions {
  range first;
  range second;

  constexpr index_t size() const noexcept { return first.size() + second.size(); }
  /// The position of local row t.
  constexpr index_t at(index_t t) const noexcept {
    return t < first.size() ? first.begin + t : second.begin + (t - first.size());
  }
  friend constexpr bool operator==(sequence_positions const&, sequence_positions const&) = default;
};

/// What one rank's queries have to do with another's keys, in local rows: every query of `queries` sees every
/// key of `keys`, or with `causal` (the two ranks are one) query t sees keys 0 .. t. Nothing else is seen.
struct sequence_block {
  range queries;
  range keys;
  bool causal = false;

  constexpr bool empty() const noexcept { return queries.empty() || keys.empty(); }
  friend constexpr bool operator==(sequence_block const&, sequence_block const&) = default;
};

/// How a sequence is laid over ranks. Postcondition: the ranks' positions are disjoint and cover [0, length);
/// each rank's are in order.
struct sequence_shards {
  index_t length = 0;
  int ranks = 1;
  sequence_assignment assignment = sequence_assignment::zigzag;

  /// Throws size_error (E-layout-001) for a rank or a length that cannot be.
  constexpr sequence_positions positions(int rank, site where = site::here()) const {
    if (assignment == sequence_assignment::contiguous) {
      auto const part = shard_of(length, ranks, rank, 1, where);
      return {part, {part.end, part.end}};
    }
    auto const chunks = 2 * index_t{ranks};
    (void)shard_of(length, ranks, rank, 1, where); // is there such a rank
    return {shard_of(length, chunks, rank, 1, where), shard_of(length, chunks, chunks - 1 - rank, 1, where)};
  }

  constexpr index_t local_length(int rank, site where = site::here()) const {
    return positions(rank, where).size();
  }

  /// The largest local length: what a buffer must hold that any rank's rows pass through.
  constexpr index_t longest(site where = site::here()) const {
    index_t most = 0;
    for (int r = 0; r < ranks; ++r)
      if (auto const mine = local_length(r, where); mine > most) most = mine;
    return most;
  }

  /// What attention leaves to do between the queries of one rank and the keys of another. Chunks are ordered
  /// by position, so between two ranks each chunk of queries sees a chunk of keys whole or not at all: an
  /// earlier rank's first chunk is seen by all queries here, and a later rank's keys by the second chunk.
  constexpr sequence_block block(int query_rank, int key_rank, bool causal, site where = site::here()) const {
    auto const queries = positions(query_rank, where), keys = positions(key_rank, where);
    range const all_queries{0, queries.size()}, all_keys{0, keys.size()};
    if (!causal || query_rank == key_rank) return {all_queries, all_keys, causal};
    if (key_rank < query_rank) return {all_queries, {0, keys.first.size()}, false};
    return {{queries.first.size(), queries.size()}, all_keys, false};
  }

  /// Pairs of a query of this rank and a key, at or before it, of any rank.
  constexpr index_t causal_pairs(int rank, site where = site::here()) const {
    auto const mine = positions(rank, where);
    constexpr auto below = [](index_t end) { return end * (end + 1) / 2; };
    return below(mine.first.end) - below(mine.first.begin) + below(mine.second.end) -
           below(mine.second.begin);
  }
};

} // namespace tessera::inline TESSERA_ABI::layout

#endif
