/// The calls of NCCL: one communicator of it, the stream that they run in, every return code looked at, and
/// the watchdog.
#ifndef TESSERA_COMM_DETAIL_NCCL_LINK_HPP
#define TESSERA_COMM_DETAIL_NCCL_LINK_HPP

#if defined(TESSERA_WITH_NCCL)

#include <nccl.h>

#include <tessera/comm/detail/nccl_side.hpp>
#include <tessera/exec/event.hpp>

namespace tessera::inline TESSERA_ABI::comm::detail {

[[noreturn, gnu::cold]] inline void throw_nccl(ncclResult_t code, ncclComm_t comm, char const* what,
                                               site where) {
  auto const* last = ncclGetLastError(comm);
  auto const text =
      tessera::text_of("NCCL: ", what, " failed: ", ncclGetErrorString(code),
                       last != nullptr && *last != '\0' ? "; " : "", last != nullptr ? last : "");
  if (code == ncclRemoteError) throw peer_failed("E-comm-102", where, text);
  throw library_error("E-comm-101", where, text);
}
/// For calls that have ended when they return.
inline void check_nccl(ncclResult_t code, ncclComm_t comm, char const* what, site where) {
  if (code != ncclSuccess) throw_nccl(code, comm, what, where);
}

/// A call as the watchdog and error messages need it.
struct nccl_call {
  call request;
  signature sign;
  std::int64_t sequence = 0;
  std::uint64_t group = 0;
  bool blocking = false, has_sign = false;
  char const* doing = nullptr; // what to call it where it is no call of a communicator

  signature const& signed_by(int ranks) noexcept {
    if (!has_sign) sign = signature_of(request, ranks, sequence, group, blocking);
    if (doing != nullptr) __builtin_snprintf(sign.place, sizeof sign.place, "%s", doing);
    has_sign = true;
    return sign;
  }
  std::string text(int ranks) { return doing != nullptr ? doing : text_of(signed_by(ranks)); }
};

/// How NCCL names elements: its own type, or, where it has none, several of another one.
struct nccl_type {
  ncclDataType_t type;
  index_t factor = 1;
};
inline nccl_type nccl_type_of(element type) noexcept {
  constexpr nccl_type types[] = {{ncclUint8},    {ncclBfloat16}, {ncclFloat16}, {ncclFloat32}, {ncclFloat64},
                                 {ncclInt8},     {ncclUint8, 2}, {ncclInt32},   {ncclInt64},   {ncclUint8},
                                 {ncclUint8, 2}, {ncclUint32},   {ncclUint64}};
  return types[static_cast<int>(type)];
}
inline bool nccl_adds(element type) noexcept {
  return type != element::bytes && nccl_type_of(type).factor == 1;
}

class nccl_link {
public:
  nccl_link(ncclUniqueId const& id, int my_rank, int ranks, exec::cuda& space, communicator_options options,
            std::unique_ptr<nccl_side> beside, site where)
      : nccl_link(my_rank, ranks, space, options.stall_limit,
                  static_cast<std::unique_ptr<nccl_side>&&>(beside), where) {
    auto config = configuration();
    nccl_call making = making_of("the beginning of comm::nccl", where);
    settle(ncclCommInitRankConfig(&comm_, ranks, id, my_rank, &config), "ncclCommInitRankConfig", making);
  }
  /// The part of `whole` that has this color: rank `my_rank` of `ranks`. Collective over `whole`.
  nccl_link(nccl_link& whole, int color, int key, int my_rank, int ranks, site where)
      : nccl_link(my_rank, ranks, whole.compute, whole.stall_limit_,
                  whole.side_ ? whole.side_->split(color, key, where) : nullptr, where) {
    auto config = configuration();
    nccl_call making = making_of("split of comm::nccl", where);
    auto const code = ncclCommSplit(whole.comm_, color, key, &comm_, &config);
    whole.settle(code, "ncclCommSplit", making);
    if (comm_ != nullptr) settle(code, "ncclCommSplit", making);
  }
  nccl_link(nccl_link const&) = delete;
  nccl_link& operator=(nccl_link const&) = delete;
  /// Waits for what is under way; aborts where that cannot end, or while an exception unwinds.
  ~nccl_link() {
    if (comm_ == nullptr) return;
    if (std::uncaught_exceptions() > unwinding_) {
      abort();
      return;
    }
    try {
      nccl_call ending = making_of("the end of comm::nccl", site{});
      exec::event last(lane);
      last.record(lane);
      wait(last, ending);
      settle(ncclCommFinalize(comm_), "ncclCommFinalize", ending);
      (void)ncclCommDestroy(comm_); // a destructor can't report
    } catch (...) {
      abort();
    }
  }

  int const rank, size;
  exec::cuda& compute; // the caller's
  exec::cuda lane;     // what NCCL's calls, and the kernels between them, run in

  bool lost() const noexcept { return comm_ == nullptr; }
  /// Ends everything under way, here and, as far as NCCL can, on the other ranks.
  void abort() noexcept {
    if (comm_ != nullptr) (void)ncclCommAbort(comm_); // there is nobody to tell that this failed
    comm_ = nullptr;
  }

  /// Puts a collective transfer into the lane.
  void enqueue(transfer const& t, nccl_call& c) {
    auto const type = nccl_type_of(t.type).type;
    auto const items = [&](index_t count) {
      return static_cast<std::size_t>(count * nccl_type_of(t.type).factor);
    };
    auto const n = items(t.count);
    bool const at_root = rank == t.root;
    if (n == 0 && t.what != collective::barrier && t.in_counts == nullptr) return;
    switch (t.what) {
    case collective::barrier:
      return settle(ncclAllReduce(token_.data(), token_.data(), 1, ncclInt32, ncclSum, comm_, lane.stream()),
                    "ncclAllReduce", c);
    case collective::broadcast: {
      auto* data = at_root ? const_cast<void*>(t.in) : t.out;
      return settle(ncclBroadcast(data, data, n, type, t.root, comm_, lane.stream()), "ncclBroadcast", c);
    }
    case collective::reduce:
      return settle(ncclReduce(t.in, t.out, n, type, operation_of(t.operation), t.root, comm_, lane.stream()),
                    "ncclReduce", c);
    case collective::all_reduce:
      return settle(ncclAllReduce(t.in, t.out, n, type, operation_of(t.operation), comm_, lane.stream()),
                    "ncclAllReduce", c);
    case collective::reduce_scatter:
      if (t.out_counts == nullptr)
        return settle(
            ncclReduceScatter(t.in, t.out, n, type, operation_of(t.operation), comm_, lane.stream()),
            "ncclReduceScatter", c);
      return grouped(c, [&] {
        for_parts(t, t.out_counts, [&](int r, index_t count, index_t offset) {
          in_group(ncclReduce(at(t.in, offset), r == rank ? t.out : nullptr, items(count), type,
                              operation_of(t.operation), r, comm_, lane.stream()),
                   "ncclReduce", c);
        });
      });
    case collective::all_gather:
      if (t.out_counts == nullptr)
        return settle(ncclAllGather(t.in, t.out, n, type, comm_, lane.stream()), "ncclAllGather", c);
      return grouped(c, [&] {
        for_parts(t, t.out_counts, [&](int r, index_t count, index_t offset) {
          in_group(ncclBroadcast(r == rank ? t.in : at(t.out, offset), at(t.out, offset), items(count), type,
                                 r, comm_, lane.stream()),
                   "ncclBroadcast", c);
        });
      });
    case collective::gather:
    case collective::scatter:
    case collective::all_to_all:
      return exchange(t, c);
    default: // messages go in groups, split as all_gather
      return;
    }
  }

  /// What `calls` put, as one group: all of it makes progress together.
  template <std::invocable Calls>
  void grouped(nccl_call& c, Calls calls) {
    check_nccl(ncclGroupStart(), comm_, "ncclGroupStart", c.request.where);
    try {
      calls();
    } catch (...) {
      (void)ncclGroupEnd(); // the first error matters more
      abort();
      throw;
    }
    settle(ncclGroupEnd(), "ncclGroupEnd", c);
  }
  void put_send(void const* data, index_t n, element of, int peer, nccl_call& c) {
    auto const [type, factor] = nccl_type_of(of);
    if (n > 0)
      in_group(ncclSend(data, static_cast<std::size_t>(n * factor), type, peer, comm_, lane.stream()),
               "ncclSend", c);
  }
  void put_receive(void* data, index_t n, element of, int peer, nccl_call& c) {
    auto const [type, factor] = nccl_type_of(of);
    if (n > 0)
      in_group(ncclRecv(data, static_cast<std::size_t>(n * factor), type, peer, comm_, lane.stream()),
               "ncclRecv", c);
  }

  /// In the lane. Memory of the host is pinned.
  void copy(void* to, void const* from, index_t bytes, site where) {
    if (bytes > 0 && to != from)
      exec::cuda_check(
          cudaMemcpyAsync(to, from, static_cast<std::size_t>(bytes), cudaMemcpyDefault, lane.stream()),
          "cudaMemcpyAsync", where);
  }

  /// Errors that came up since the last call. The communicator is aborted then.
  void check(nccl_call& c) {
    auto state = ncclSuccess;
    check_nccl(ncclCommGetAsyncError(comm_, &state), comm_, "ncclCommGetAsyncError", c.request.where);
    if (state != ncclSuccess && state != ncclInProgress) fail(state, name_of(c.request.what), c);
  }
  bool passed(exec::event const& event, nccl_call& c) {
    if (event.passed(c.request.where)) return true;
    check(c);
    return false;
  }
  /// The host waits, and watches.
  void wait(exec::event const& event, nccl_call& c) {
    for (patience p; !event.passed(c.request.where);) pause(p, c);
    check(c); // what was aborted from elsewhere has ended too
  }

private:
  struct patience {
    double start = seconds_now(), troubled = 0;
    int polls = 0;
  };

  nccl_link(int my_rank, int ranks, exec::cuda& space, double stall_limit,
            std::unique_ptr<nccl_side>&& beside, site where)
      : rank(my_rank), size(ranks), compute(space),
        lane({.device = space.device(), .workspace_bytes = 0}, where), stall_limit_(stall_limit),
        side_(static_cast<std::unique_ptr<nccl_side>&&>(beside)), token_(16, {}, where) {}

  /// With a limit no call of NCCL may block the host: it could not watch.
  ncclConfig_t configuration() const noexcept {
    ncclConfig_t config = NCCL_CONFIG_INITIALIZER;
    config.blocking = stall_limit_ > 0 ? 0 : 1;
    return config;
  }
  static nccl_call making_of(char const* doing, site where) noexcept {
    nccl_call making;
    making.doing = doing;
    making.request.where = where;
    return making;
  }
  static ncclRedOp_t operation_of(reduction operation) noexcept {
    return operation == reduction::sum ? ncclSum : operation == reduction::max ? ncclMax : ncclMin;
  }

  /// Each part that is not empty: rank, elements, offset in bytes.
  template <class F>
  void for_parts(transfer const& t, index_t const* counts, F f) const {
    index_t offset = 0;
    for (int r = 0; r < size; ++r) {
      auto const count = counts != nullptr ? counts[r] : t.count;
      if (count > 0) f(r, count, offset);
      offset += count * bytes_of(t.type);
    }
  }
  /// gather, scatter, all_to_all: one group of sends and receives; a rank's own part is a copy.
  void exchange(transfer const& t, nccl_call& c) {
    auto const item = bytes_of(t.type);
    bool const to_all = t.what != collective::gather, from_all = t.what != collective::scatter;
    bool const sends = t.what != collective::scatter || rank == t.root;
    bool const receives = t.what != collective::gather || rank == t.root;
    auto const own = t.in_counts != nullptr ? t.in_counts[rank] : t.count;
    auto const offset = [&](index_t const* counts) { return offset_of(rank, t.count, counts) * item; };
    if (sends && receives && own > 0) {
      auto const* from = to_all ? at(t.in, offset(t.in_counts)) : t.in;
      auto* to = from_all ? at(t.out, offset(t.out_counts)) : t.out;
      copy(to, from, own * item, t.where);
    }
    grouped(c, [&] {
      if (sends && to_all)
        for_parts(t, t.in_counts, [&](int r, index_t n, index_t offset) {
          if (r != rank) put_send(at(t.in, offset), n, t.type, r, c);
        });
      else if (sends && rank != t.root)
        put_send(t.in, own, t.type, t.root, c);
      if (receives && from_all)
        for_parts(t, t.out_counts, [&](int r, index_t n, index_t offset) {
          if (r != rank) put_receive(at(t.out, offset), n, t.type, r, c);
        });
      else if (receives && rank != t.root)
        put_receive(t.out, own, t.type, t.root, c);
    });
  }

  void in_group(ncclResult_t code, char const* what, nccl_call& c) {
    if (code != ncclSuccess && code != ncclInProgress) throw_nccl(code, comm_, what, c.request.where);
  }
  /// Waits until NCCL has taken a call: at once where it blocks.
  void settle(ncclResult_t code, char const* what, nccl_call& c) {
    for (patience p; code == ncclInProgress;) {
      check_nccl(ncclCommGetAsyncError(comm_, &code), comm_, "ncclCommGetAsyncError", c.request.where);
      if (code == ncclInProgress) pause(p, c);
    }
    if (code != ncclSuccess) fail(code, what, c);
  }
  [[noreturn]] void fail(ncclResult_t code, char const* what, nccl_call& c) {
    try {
      throw_nccl(code, comm_, what, c.request.where);
    } catch (...) {
      abort();
      throw;
    }
  }

  /// Between two looks at something that has not ended: throws where it never will.
  void pause(patience& p, nccl_call& c) {
    if (comm_ != nullptr) check(c);
    // Half a millisecond of eagerness; then the processor is others'.
    constexpr timespec rest{0, 20'000};
    p.polls < 256 ? void(::sched_yield()) : void(::nanosleep(&rest, nullptr));
    if (++p.polls % 64 != 0) return;
    auto const now = seconds_now();
    nccl_side::news news;
    if (side_) news = side_->poll();
    // A rank that has ended well leaves too, what it sent may still be on its way, and messages between
    // others are no business of its.
    constexpr double benefit_of_doubt = 0.2;
    if (news.failed || (!news.trouble.empty() && !c.request.is_point_to_point())) {
      if (p.troubled == 0) p.troubled = now;
      if (now - p.troubled > benefit_of_doubt) {
        abort();
        throw peer_failed("E-comm-103", c.request.where, c.text(size), " cannot finish: ", news.trouble);
      }
    }
    if (stall_limit_ <= 0 || (!news.asked && now - p.start <= stall_limit_)) return;
    auto const& sign = c.signed_by(size);
    auto const missing =
        side_ ? side_->missing(sign, stall_limit_ < 1 ? stall_limit_ : 1.0)
              : std::string("ranks that cannot be asked: this communicator was made from an id alone");
    abort();
    throw stalled("E-comm-021", c.request.where, "rank ", rank, " of ", size, " gave up ", c.text(size),
                  " (the limit is ", stall_limit_, " s); it waited for ", missing);
  }

  double const stall_limit_;
  std::unique_ptr<nccl_side> side_;
  buffer<exec::cuda_memory> token_; // what a barrier sends
  ncclComm_t comm_ = nullptr;
  int const unwinding_ = std::uncaught_exceptions();
};

} // namespace tessera::inline TESSERA_ABI::comm::detail

#endif

#endif
