/// Rows that travel between ranks while rows at hand are worked on: what the products of
/// parallel/overlapped_linear.hpp have in common.
#ifndef TESSERA_PARALLEL_DETAIL_OVERLAP_HPP
#define TESSERA_PARALLEL_DETAIL_OVERLAP_HPP

#include <algorithm>

#include <tessera/comm/communicator.hpp>
#include <tessera/core/arena.hpp>
#include <tessera/exec/copy.hpp>
#include <tessera/exec/scratch.hpp>
#include <tessera/layout/shard.hpp>
#include <tessera/ops/shapes.hpp>

namespace tessera::inline TESSERA_ABI::parallel::detail {

/// Tag of the messages that bring rows.
inline constexpr int rows_travel = 5;

/// Which rows belong to which rank, and the chunks of them.
struct row_blocks {
  index_t total = 0;
  int ranks = 1;
  std::span<index_t const> counts; // empty: even shares

  layout::range of(int rank) const {
    if (counts.empty()) return layout::shard_of(total, ranks, rank);
    index_t begin = 0;
    for (int r = 0; r < rank; ++r) begin += counts[static_cast<std::size_t>(r)];
    return {begin, begin + counts[static_cast<std::size_t>(rank)]};
  }
  layout::range chunk(int rank, int chunk, int chunks) const {
    auto const block = of(rank), part = layout::shard_of(block.size(), chunks, chunk);
    return {block.begin + part.begin, block.begin + part.end};
  }
  /// As many chunks as the longest block can be cut into, at most `wanted`: the same on all ranks.
  int useful_chunks(int wanted) const {
    index_t longest = 1;
    for (int r = 0; r < ranks; ++r) longest = (std::max)(longest, of(r).size());
    return longest < wanted ? narrow<int>(longest) : wanted;
  }
  /// Rows of the first chunk of all blocks; no other one has more.
  index_t rows_in_chunk(int chunks) const {
    index_t rows = 0;
    for (int r = 0; r < ranks; ++r) rows += chunk(r, 0, chunks).size();
    return rows;
  }

  /// `mine` and `all` are the rows of this rank's block and of all blocks.
  void require(char const* operation, int rank, index_t mine, int chunks, site where) const {
    if (chunks < 1)
      throw config_error("E-parallel-091", where, operation, ": chunks is ", chunks, ", need 1 or more");
    bool fits = counts.empty() || counts.size() == static_cast<std::size_t>(ranks);
    index_t sum = 0;
    for (auto each : counts) fits = fits && each >= 0, sum += each;
    fits = fits && (counts.empty() || sum == total);
    if (!fits)
      throw size_error("E-parallel-090", where, operation, ": overlap_options::rows has ", counts.size(),
                       " blocks of ", sum, " rows together, need ", ranks, " of ", total);
    if (mine != of(rank).size())
      throw size_error("E-parallel-090", where, operation, ": rank ", rank, " of ", ranks, " gave ", mine,
                       " rows, and its block of ", total, " has ", of(rank).size());
  }
};

/// Brings all ranks' rows to `all` and calls body(begin, end) for ranges of rows that are there, each row
/// once: this rank's while the first peer's travel, and so on round the ranks.
template <exec::space Ex, comm::communicator Comm, storage_scalar T, memory_space M, class Body>
void gather_rows(Ex& ex, Comm& comm, view<T, 2, M> all, view<T const, 2, M> mine, row_blocks const& blocks,
                 int chunks, Body body, site where) {
  auto const rank = comm.rank(), ranks = comm.size();
  auto const rows_of = [&](int r) { return all.slice(0, blocks.of(r).begin, blocks.of(r).end); };
  memory_span<T const, M> const own = mine.span(where);
  if (auto const place = rows_of(rank); place.data() != mine.data())
    exec::copy(ex, place.span(where), own, where);
  for (int step = 0; step < ranks; ++step) {
    typename Comm::request sent, arrives;
    bool const more = step + 1 < ranks;
    if (more) { // the same pairs at the same step on all ranks
      auto const from = (rank + step + 1) % ranks, to = (rank + ranks - step - 1) % ranks;
      arrives = comm.start_receive(rows_of(from).span(where), from, rows_travel, where);
      sent = comm.start_send(own, to, rows_travel, where);
    }
    for (int c = 0; c < chunks; ++c) {
      if (more) { // both begin, or go on, when they are asked
        (void)sent.test();
        (void)arrives.test();
      }
      auto const part = blocks.chunk((rank + step) % ranks, c, chunks);
      if (!part.empty()) body(part.begin, part.end);
    }
    if (!more) return;
    sent.wait();
    arrives.wait();
  }
}

/// `out` = this rank's rows of the sum over ranks of rows that product(part, begin, end) computes: chunk by
/// chunk, each being summed while the next is computed, and the last while `in_the_shade` runs.
template <exec::space Ex, comm::communicator Comm, storage_scalar T, memory_space M, class Product,
          class Shade>
void scatter_rows(Ex& ex, Comm& comm, view<T, 2, M> out, row_blocks const& blocks, int wanted_chunks,
                  comm::summation order, arena<M>& memory, Product product, Shade in_the_shade, site where) {
  auto const rank = comm.rank(), ranks = comm.size();
  auto const width = out.extent(1);
  auto const chunks = blocks.useful_chunks(wanted_chunks);
  arena_scope const scope(memory);
  auto const room = blocks.rows_in_chunk(chunks);
  view<T, 2, M> summands[2];
  for (int i = 0; i < 2 && i < chunks; ++i) summands[i] = memory.template take<T, 2>({room, width}, where);
  auto* const counts = ex.template handle<exec::scratch<row_blocks>>().template take<index_t>(ranks, where);
  typename Comm::request pending[2];
  for (int c = 0; c < chunks; ++c) {
    auto& mine = pending[c % 2];
    mine.wait(); // the chunk before the last: its summands' memory is used again
    auto const& summand = summands[c % 2];
    index_t row = 0;
    for (int r = 0; r < ranks; ++r) {
      auto const part = blocks.chunk(r, c, chunks);
      counts[r] = part.size() * width;
      if (part.empty()) continue;
      product(summand.slice(0, row, row + part.size()), part.begin, part.end);
      row += part.size();
      (void)pending[1 - c % 2].test();
    }
    auto const begin = blocks.of(rank).begin;
    auto const landing = blocks.chunk(rank, c, chunks);
    mine = comm.start_reduce_scatter_v(out.slice(0, landing.begin - begin, landing.end - begin).span(where),
                                       memory_span<T const, M>(summand.slice(0, 0, row).span(where)),
                                       std::span<index_t const>(counts, static_cast<std::size_t>(ranks)),
                                       {.order = order}, where);
  }
  in_the_shade();
  pending[chunks % 2].wait();
  pending[1 - chunks % 2].wait();
}

template <storage_scalar T, memory_space M>
index_t scatter_rows_bytes(row_blocks const& blocks, int wanted_chunks, index_t width) {
  auto const chunks = blocks.useful_chunks(wanted_chunks);
  return (chunks < 2 ? 1 : 2) * arena<M>::template bytes_for<T>(blocks.rows_in_chunk(chunks) * width);
}

} // namespace tessera::inline TESSERA_ABI::parallel::detail

#endif
