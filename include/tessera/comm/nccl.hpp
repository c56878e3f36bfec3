/// Ranks on NCCL, one GPU each: messages go from device memory to device memory. Made over the ranks of
/// another communicator, or from an id that the host application hands over.
///
///     exec::cuda ex({.device = local_rank});
///     comm::nccl ranks(world, ex);                      // world: comm::mpi, comm::threads
///     auto sum = ranks.start_all_reduce(gradients);     // device_span<bf16, exec::cuda_memory>
///     ops::gelu(ex, y, x);                              // the stream of `ex` goes on meanwhile
///     sum.wait();                                       // the stream of `ex` waits, the host does not
///     auto loss = ranks.all_reduce(local_loss);         // host values too: staged, and blocking
///
/// Order. Calls run in a stream of their own, in the order in which they were made: each after what `ex` had
/// been given when the call was made. wait() orders the stream of `ex` after the call. The host waits where
/// it must see something: messages in host memory, barriers, sums of integers in a fixed order (overflow),
/// the checked level, and, since somebody has to watch, every wait() of a communicator with a stall limit.
/// test() asks and never waits. Without checks and limit, calls on device memory can be captured in a graph.
///
/// Sums. rank_order: exchanged in the storage type and added by a kernel, rank 0 first, in fp32: the same
/// bits as on every other communicator. binary_tree: the same, added by another kernel. native: ncclAllReduce
/// and its kin; NCCL chooses ring, tree or switch by size and machine, and with it the order of additions;
/// 16-bit floats are added pair by pair, in fp32 or in the storage type, and rounded each time a partial sum
/// is stored; a NaN may be lost in maxima and minima; integers wrap. NCCL has no 16-bit integers: those are
/// always added in rank_order.
///
/// Messages (send, receive) have no tags in NCCL. Requests for messages go out together when one of them is
/// waited for or tested, or with the next blocking message; those that go out together are matched by tag,
/// otherwise the order of a pair of ranks must be the same on both sides. Checked communicators find tags,
/// types and lengths that differ. Messages and collectives share one stream: use a split where they cross.
///
/// Cost of device calls: one NCCL call or group each; a fixed order of sums two and a kernel (one up to 2
/// KiB). A stall limit puts NCCL in its non-blocking mode, some 10 us a call. Needs the kernels of
/// comm/cuda/nccl.cuh, compiled once in the program by nvcc for each type that is reduced.
///
/// Exists under TESSERA_WITH_NCCL.
#ifndef TESSERA_COMM_NCCL_HPP
#define TESSERA_COMM_NCCL_HPP

#if defined(TESSERA_WITH_NCCL)

#include <tessera/comm/detail/interface.hpp>
#include <tessera/comm/detail/nccl_engine.hpp>

namespace tessera::inline TESSERA_ABI::comm {

/// The same on all ranks; see communicator_options.
struct nccl_options {
  bool checked = false;
  double stall_limit = 0;
};

/// What the ranks of one communicator have in common before they know each other: made on one of them, and
/// brought to the others by the host application, byte by byte.
struct nccl_id {
  ncclUniqueId value{};

  /// Throws library_error (E-comm-101).
  static nccl_id make(site where = site::here()) {
    nccl_id id;
    detail::check_nccl(ncclGetUniqueId(&id.value), nullptr, "ncclGetUniqueId", where);
    return id;
  }
  std::span<std::byte> bytes() noexcept { return std::as_writable_bytes(std::span<char>(value.internal)); }
};

namespace detail {

/// Rank 0's new id, on all ranks; so is its failure.
template <host_communicator Host>
nccl_id shared_id(Host& host, site where) {
  nccl_id id;
  auto made = std::int32_t{ncclSuccess};
  if (host.rank() == 0) made = ncclGetUniqueId(&id.value);
  host.broadcast(std::span<std::int32_t>(&made, 1), 0, where);
  check_nccl(static_cast<ncclResult_t>(made), nullptr, "ncclGetUniqueId on rank 0", where);
  host.broadcast(id.bytes(), 0, where);
  return id;
}

} // namespace detail

/// A communicator over GPUs, one a rank. Move-only. `ex` outlives it. Destroyed on all ranks; while an
/// exception unwinds it is aborted, which ends what others wait for.
class nccl : public detail::interface<nccl, detail::nccl_engine> {
  using base = detail::interface<nccl, detail::nccl_engine>;

public:
  /// Over the ranks of `host`, of which it keeps a split: to bring the id, and to ask the others when
  /// something is stuck. A thread rank that fails wakes the others, as in comm::threads. Collective. Throws
  /// config_error if the ranks' options differ, library_error, or peer_failed, stalled.
  template <host_communicator Host>
  nccl(Host& host, exec::cuda& ex, nccl_options options = {}, site where = site::here())
      : nccl{detail::shared_id(host, where), host.rank(), host.size(), ex, options,
             detail::side_of(host, where),   where} {} // braces: from left to right

  /// From an id that all `size` ranks were given. Without another communicator to ask, a stall can only name
  /// what this rank waits in.
  nccl(nccl_id const& id, int rank, int size, exec::cuda& ex, nccl_options options = {},
       site where = site::here())
      : nccl(id, rank, size, ex, options, std::unique_ptr<detail::nccl_side>(), where) {}

private:
  friend base;
  explicit nccl(detail::nccl_engine* owned) noexcept : base(owned) {}
  nccl(nccl_id const& id, int rank, int size, exec::cuda& ex, nccl_options options,
       std::unique_ptr<detail::nccl_side> side, site where)
      : base(make(id, rank, size, ex, {options.checked, options.stall_limit},
                  static_cast<std::unique_ptr<detail::nccl_side>&&>(side), where)) {}

  static detail::nccl_engine* make(nccl_id const& id, int rank, int size, exec::cuda& ex,
                                   communicator_options options, std::unique_ptr<detail::nccl_side> side,
                                   site where) {
    if (size < 1 || rank < 0 || rank >= size)
      throw config_error("E-comm-104", where, "comm::nccl: rank ", rank, " of ", size,
                         " ranks; ranks are numbered from 0");
    auto link = std::make_unique<detail::nccl_link>(
        id.value, rank, size, ex, options, static_cast<std::unique_ptr<detail::nccl_side>&&>(side), where);
    auto engine = std::make_unique<detail::nccl_engine>(
        static_cast<std::unique_ptr<detail::nccl_link>&&>(link), options, 1);
    engine->agree_on_options(where);
    return engine.release();
  }
};

static_assert(communicator<nccl>);

} // namespace tessera::inline TESSERA_ABI::comm

#endif

#endif
