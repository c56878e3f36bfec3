/// Ranks are a concept: code that communicates is a template over `communicator` and runs unchanged on one
/// rank (`comm::self`), on threads of one process (`comm::threads`), on MPI (`comm::mpi`) and between GPUs
/// (`comm::nccl`), with the same bits.
///
///     template <comm::communicator Comm>
///     void average(Comm& comm, std::span<float> values) {
///       comm.all_reduce(values);                              // every rank: the same bits
///       for (auto& v : values) v /= static_cast<float>(comm.size());
///     }
#ifndef TESSERA_COMM_COMMUNICATOR_HPP
#define TESSERA_COMM_COMMUNICATOR_HPP

#include <cstddef>
#include <span>

#include <tessera/core/extents.hpp>
#include <tessera/core/memory.hpp>
#include <tessera/core/memory_span.hpp>
#include <tessera/core/scalar.hpp>

namespace tessera::inline TESSERA_ABI::comm {

/// What is done with the ranks' values. In rank_order a NaN of any rank makes the result NaN.
enum class reduction : std::uint8_t { sum, max, min };

/// Who adds, and in which order.
/// rank_order: values travel in their storage type; the sum is taken rank 0 first, in fp32 for the storage
/// types, in fp64 for double, exactly for integers (overflow is numeric_error on all ranks), and rounded
/// once. The same bits on every model and in every run. native: the message passing library's own reduction:
/// one call, an order and a rounding of its choice, no overflow check. `self` and `threads` have no such
/// library; there it is rank_order.
/// binary_tree: as rank_order, but floating-point sums over n ranks are tree(0, n), where tree(r, 1) is what
/// rank r has and tree(r, n) = tree(r, h) + tree(r + h, n - h) with h the largest power of two below n:
/// ((0+1)+(2+3)) + ((4+5)+6) for seven. So ranks may add aligned pairs beforehand, in the same way: 8 values
/// on 8 ranks, on 4 ranks that each keep the fp32 sum of two, or on one that adds them all give the same
/// bits.
enum class summation : std::uint8_t { rank_order, native, binary_tree };

struct reduce_options {
  reduction operation = reduction::sum;
  summation order = summation::rank_order;
};

/// The calls that a traffic meter, a signature or an error tells apart.
enum class collective : std::uint8_t {
  barrier,
  broadcast,
  reduce,
  all_reduce,
  reduce_scatter,
  all_gather,
  all_to_all,
  gather,
  scatter,
  send,
  receive,
  split
};
inline constexpr int collective_count = 12;

constexpr char const* name_of(collective what) noexcept {
  constexpr char const* names[] = {"barrier",        "broadcast",  "reduce",     "all_reduce",
                                   "reduce_scatter", "all_gather", "all_to_all", "gather",
                                   "scatter",        "send",       "receive",    "split"};
  return names[static_cast<int>(what)];
}
constexpr char const* name_of(reduction operation) noexcept {
  constexpr char const* names[] = {"sum", "max", "min"};
  return names[static_cast<int>(operation)];
}
constexpr char const* name_of(summation kind) noexcept {
  constexpr char const* names[] = {"rank_order", "native", "binary_tree"};
  return names[static_cast<int>(kind)];
}

/// What reductions take: the storage types, double, and integers other than bool.
template <class T>
concept reducible_scalar = storage_scalar<T> || std::same_as<T, double> ||
    (std::integral<T> && !std::same_as<T, bool> && !std::is_const_v<T> && sizeof(T) <= 8);

/// What messages are made of: the above, and std::byte. Send anything else as bytes (std::as_bytes).
template <class T>
concept message_scalar = reducible_scalar<T> || std::same_as<T, std::byte>;

/// Settings of a communicator, the same on all of its ranks: they are compared when it is made.
struct communicator_options {
  /// Compare the signature of every collective over all ranks before it moves data (`threads` always does),
  /// and guard buffers lent to requests: until `wait` an output reads as NaN (all bits set), and writing to
  /// an output or input is an error.
  bool checked = false;
  /// Seconds that a call waits for other ranks before it throws `stalled`, which names the collective and the
  /// ranks that are missing. 0: for ever.
  double stall_limit = 0;
};

/// Calls, payload, what this rank sends, and time of one kind of call. Payload is the larger of the caller's
/// two buffers: n bytes for an all_reduce of n bytes, the whole length for reduce_scatter and all_gather.
///
/// `sent` is what a rank of N sends where data is moved as the usual algorithms move it, whatever the library
/// below really does (for long messages both orders of sums do just this). With n bytes of payload:
///
///     all_reduce                           2 n (N-1)/N    a reduce_scatter and an all_gather
///     reduce_scatter, all_gather, split      n (N-1)/N    all parts but one, taken as equal
///     broadcast, reduce                      n            down or up a chain of ranks; 0 where N = 1
///     all_to_all, scatter                    its input without its own part; scatter: 0 but on the root
///     gather                                 its part; 0 on the root
///     send                                   n
///     receive, barrier                       0
struct traffic {
  index_t calls = 0;
  index_t sent = 0;
  index_t bytes = 0;
  double seconds = 0;
};

/// What one rank's communicator was used for. Calls and bytes are always counted; seconds (spent inside
/// calls, waiting included) only after `time_calls(true)`, since reading the clock twice costs some 50 ns.
class traffic_meter {
public:
  explicit traffic_meter(int ranks = 1) noexcept : ranks_(ranks) {}

  traffic of(collective what) const noexcept {
    auto entry = entries_[static_cast<int>(what)];
    entry.sent += sent_by_formula(what, entry.bytes);
    return entry;
  }
  traffic total() const noexcept {
    traffic sum;
    for (int what = 0; what < collective_count; ++what) {
      auto const entry = of(static_cast<collective>(what));
      sum.calls += entry.calls;
      sum.bytes += entry.bytes;
      sum.sent += entry.sent;
      sum.seconds += entry.seconds;
    }
    return sum;
  }
  void time_calls(bool on) noexcept { timed_ = on; }
  bool times_calls() const noexcept { return timed_; }
  void reset() noexcept {
    for (auto& entry : entries_) entry = {};
  }

  /// One call. `sent` is what its payload does not tell: of all_to_all, scatter, gather and send.
  void count(collective what, index_t bytes, index_t sent = 0) noexcept {
    auto& entry = entries_[static_cast<int>(what)];
    ++entry.calls;
    entry.bytes += bytes;
    entry.sent += sent;
  }
  void add_time(collective what, double seconds) noexcept {
    entries_[static_cast<int>(what)].seconds += seconds;
  }

private:
  index_t sent_by_formula(collective what, index_t bytes) const noexcept {
    auto const others = index_t{ranks_} - 1;
    auto const parts_of_others = [&](index_t times) { // in this order: nothing overflows
      return times * (bytes / ranks_ * others) + times * (bytes % ranks_) * others / ranks_;
    };
    switch (what) {
    case collective::all_reduce:
      return parts_of_others(2);
    case collective::reduce_scatter:
    case collective::all_gather:
    case collective::split:
      return parts_of_others(1);
    case collective::broadcast:
    case collective::reduce:
      return others > 0 ? bytes : 0;
    default:
      return 0;
    }
  }

  int ranks_;
  bool timed_ = false;
  traffic entries_[collective_count];
};

/// The calls of a communicator on messages in `Memory`; `communicator` below says what they mean.
template <class C, class Memory>
concept communicates_in = memory_space<Memory> &&
    requires(C& c, memory_span<float, Memory> out, memory_span<float const, Memory> in,
             std::span<index_t const> counts, reduce_options how) {
  c.broadcast(out, 0);
  c.reduce(out, in, 0, how);
  c.all_reduce(out, how);
  c.all_reduce(out, in, how);
  c.reduce_scatter(out, in, how);
  c.reduce_scatter_v(out, in, counts, how);
  c.all_gather(out, in);
  c.all_gather_v(out, in, counts);
  c.all_to_all(out, in);
  c.all_to_all_v(out, counts, in, counts);
  c.gather(out, in, 0);
  c.gather_v(out, in, counts, 0);
  c.scatter(out, in, 0);
  c.scatter_v(out, in, counts, 0);
  c.send(in, 0, 0);
  c.receive(out, 0, 0);
  { c.start_all_reduce(out, how) } -> std::same_as<typename C::request>;
  { c.start_all_reduce(out, in, how) } -> std::same_as<typename C::request>;
  { c.start_reduce_scatter_v(out, in, counts, how) } -> std::same_as<typename C::request>;
  { c.start_all_gather_v(out, in, counts) } -> std::same_as<typename C::request>;
  { c.start_broadcast(out, 0) } -> std::same_as<typename C::request>;
  { c.start_all_to_all_v(out, counts, in, counts) } -> std::same_as<typename C::request>;
  { c.start_send(in, 0, 0) } -> std::same_as<typename C::request>;
  { c.start_receive(out, 0, 0) } -> std::same_as<typename C::request>;
};

/// A group of ranks that issue the same collectives in the same order.
///
/// Semantics (checked line by line by tests/comm/conformance.hpp); n = size(), r = rank(), 0 <= r < n:
/// - Who calls: a collective is called by every rank of the group, in the same order. Each rank is one
///   thread, which makes all of its calls.
/// - Shapes: a wrong length is size_error before anything is sent. Zero-size messages are legal and are
///   messages. Counts of the `_v` forms (one a rank, equal on all ranks) place the ranks' parts one after
///   another; all_to_all_v alone has counts of each rank's own.
/// - broadcast(data, root): data becomes the root's.
/// - reduce(out, in, root), all_reduce(in_out), all_reduce(out, in): the reduction over ranks, element by
///   element. `out` may be `in`. Away from the root, reduce ignores `out`.
/// - reduce_scatter(out, in), reduce_scatter_v(out, in, counts): part r of the reduction; `out` may lie
///   inside `in`.
/// - all_gather(out, in), all_gather_v(out, in, counts): the ranks' parts in order; `in` may be its own part
///   of `out`. gather and gather_v: the same on the root alone.
/// - scatter(out, in, root), scatter_v: part r of the root's `in`; on the root `out` may be its part of `in`.
/// - all_to_all(out, in), all_to_all_v(out, out_counts, in, in_counts): part s of `out` is part r of rank s's
///   `in`; `out` and `in` must not overlap.
/// - send(data, to, tag), receive(data, from, tag): matched by ranks and tag, in order; lengths are equal.
///   `send` may wait for its `receive`. Tags are 0 to 32767. (NCCL knows no tags: comm/nccl.hpp says what
///   remains of them.)
/// - split(color, key): ranks of one color (>= 0) form a communicator, ordered by key, then by rank.
/// - start_X(...) is X as a request. Its buffers are lent until wait() returns or test() is true; the spans
///   of counts are not. A request advances inside calls on its communicator: waits for requests come before
///   anything else that other ranks need in order to go on. Requests may be waited for in any order. All
///   ranks use start_X, or all use X: the two do not meet.
/// - all_reduce(value) returns the reduction of one value: a convenience for losses, counts, decisions.
/// - Messages are lent as std::span, and as memory_span<T, C::bulk_memory>: where the communicator's large
///   messages are at home. That is host memory for all but `nccl`, whose calls on device_span are ordered
///   with the compute stream instead of with the host: data is taken as the stream leaves it, and wait()
///   makes the stream wait.
///
/// Errors: size_error, config_error (here and now, nothing sent); collective_mismatch (checked communicators:
/// on all ranks, naming both calls), peer_failed, stalled, library_error: after those the communicator is
/// lost, and MPI may still write to buffers of calls that had not finished: keep them until MPI_Finalize.
/// numeric_error (integer overflow): on all ranks; the communicator stays usable.
template <class C>
concept communicator = communicates_in<C, host_memory> && communicates_in<C, typename C::bulk_memory> &&
    requires(C& c, reduce_options how, typename C::request pending) {
  { c.rank() } -> std::same_as<int>;
  { c.size() } -> std::same_as<int>;
  { c.meter() } -> std::same_as<traffic_meter&>;
  { c.memory() } -> std::same_as<memory_meter const&>;
  { c.options() } -> std::convertible_to<communicator_options>;
  c.barrier();
  { c.all_reduce(1.0, how) } -> std::same_as<double>;
  { c.split(0, 0) } -> std::same_as<C>;
  pending.wait();
  { pending.test() } -> std::same_as<bool>;
};

/// A communicator whose messages are in the host's memory.
template <class C>
concept host_communicator = communicator<C> && std::same_as<typename C::bulk_memory, host_memory>;

} // namespace tessera::inline TESSERA_ABI::comm

#endif
