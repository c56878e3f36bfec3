/// The calls of MPI: one for each transfer, every return code looked at, and the watchdog.
// Before the guard, since mpi.h is included by that header alone, which includes this one where it belongs.
#include <tessera/comm/mpi.hpp>

#ifndef TESSERA_COMM_DETAIL_MPI_TRANSPORT_HPP
#define TESSERA_COMM_DETAIL_MPI_TRANSPORT_HPP

#include <sched.h>

#include <tessera/comm/detail/agreement.hpp>

namespace tessera::inline TESSERA_ABI::comm::detail {

[[noreturn, gnu::cold, gnu::noinline]] inline void throw_mpi(int code, char const* what, site const& where) {
  char text[MPI_MAX_ERROR_STRING] = "unknown error";
  int length = 0;
  (void)MPI_Error_string(code, text, &length); // where even this fails, the text stands
  throw library_error("E-comm-030", where, "MPI: ", what, " failed: ", static_cast<char const*>(text));
}

inline void check_mpi(int code, char const* what, site const& where) {
  if (code != MPI_SUCCESS) throw_mpi(code, what, where);
}

/// MPI's own form of the reduction of 16-bit floats: pairs, each sum rounded to the storage type.
template <storage_scalar T, reduction Operation>
void reduce_pairs(void* in, void* in_out, MPI_Count* count, MPI_Datatype*) {
  auto const* a = static_cast<T const*>(in);
  auto* b = static_cast<T*>(in_out);
  for (MPI_Count i = 0; i < *count; ++i) {
    float value = a[i];
    combine_into(&value, b + i, 1, Operation);
    b[i] = T(value);
  }
}

class mpi_transport {
public:
  static constexpr bool checks_signatures = false;
  static constexpr bool reduces = true;

  struct ticket {
    MPI_Request pending = MPI_REQUEST_NULL;
    transfer what;
    buffer<> tables; // counts and offsets, which MPI reads until the end
  };
  struct patience {
    explicit patience(mpi_transport& t) : start(t.stall_limit_ > 0 ? MPI_Wtime() : 0) {}
    double start;
    int polls = 0;
  };

  /// Takes over `owned`, which must be a communicator of our own, and makes its second lane.
  mpi_transport(MPI_Comm owned, communicator_options options, bool device_buffers, site where)
      : mpi_transport(owned) {
    check_mpi(MPI_Comm_set_errhandler(held_.lanes[0], MPI_ERRORS_RETURN), "Comm_set_errhandler", where);
    check_mpi(MPI_Comm_dup(held_.lanes[0], &held_.lanes[1]), "Comm_dup", where);
    check_mpi(MPI_Comm_set_errhandler(held_.lanes[1], MPI_ERRORS_RETURN), "Comm_set_errhandler", where);
    check_mpi(MPI_Comm_rank(held_.lanes[0], &rank_), "Comm_rank", where);
    check_mpi(MPI_Comm_size(held_.lanes[0], &size_), "Comm_size", where);
    stall_limit_ = options.stall_limit;
    device_buffers_ = device_buffers;
    make_operations<tessera::bf16>(0, where);
    make_operations<tessera::fp16>(1, where);
  }
  mpi_transport(mpi_transport&& other) noexcept
      : rank_(other.rank_), size_(other.size_), held_(other.held_), stall_limit_(other.stall_limit_),
        device_buffers_(other.device_buffers_) {
    other.held_ = {};
  }
  mpi_transport& operator=(mpi_transport&&) = delete;
  ~mpi_transport() {
    int finalized = 1;
    if (held_.lanes[0] == MPI_COMM_NULL || MPI_Finalized(&finalized) != MPI_SUCCESS || finalized) return;
    for (auto& of_type : held_.operations)
      for (auto& operation : of_type)
        if (operation != MPI_OP_NULL) (void)MPI_Op_free(&operation); // a destructor can't report
    for (auto& lane : held_.lanes)
      if (lane != MPI_COMM_NULL) (void)MPI_Comm_free(&lane);
  }

  int rank() const noexcept { return rank_; }
  int size() const noexcept { return size_; }

  /// Always inlined: where the kind of call is known, this is that call and the look at its return code.
  [[gnu::always_inline]] void run(transfer const& t, site const& where) {
    if (t.what == collective::receive) {
      MPI_Status status;
      check_mpi(MPI_Recv_c(t.out, t.count, type_of(t.type), t.root, t.tag, held_.lanes[0], &status),
                "receive", where);
      return check_length(t, status, where);
    }
    if (t.step > 0 && t.what == collective::all_gather && t.out_counts != nullptr)
      return run_later_gather(t, where);
    check_mpi(post(t, nullptr, tables_, where), name_of(t.what), where);
  }
  void start(transfer const& t, ticket& k) {
    k.what = t;
    k.pending = MPI_REQUEST_NULL;
    check_mpi(post(t, &k.pending, k.tables, t.where), name_of(t.what), t.where);
  }
  bool test(ticket& k) {
    int ended = 0;
    MPI_Status status;
    check_mpi(MPI_Test(&k.pending, &ended, &status), name_of(k.what.what), k.what.where);
    if (ended != 0 && k.what.what == collective::receive) check_length(k.what, status, k.what.where);
    return ended != 0;
  }
  void wait(ticket& k) {
    MPI_Status status;
    check_mpi(MPI_Wait(&k.pending, &status), name_of(k.what.what), k.what.where);
    if (k.what.what == collective::receive) check_length(k.what, status, k.what.where);
  }

  void pause(patience& p, signature const& sign, site where) {
    ::sched_yield();
    if (stall_limit_ <= 0 || ++p.polls % 64 != 0) return;
    int asked = 0;
    check_mpi(MPI_Iprobe(MPI_ANY_SOURCE, status_tag, held_.lanes[1], &asked, MPI_STATUS_IGNORE), "Iprobe",
              where);
    if (asked != 0 || MPI_Wtime() - p.start > stall_limit_) give_up(sign, where);
  }

  /// Only a receive can be cancelled; other transfers stay MPI's, buffers included.
  bool abandon(ticket& k) noexcept {
    if (k.pending == MPI_REQUEST_NULL) return true;
    return k.what.what == collective::receive && MPI_Cancel(&k.pending) == MPI_SUCCESS &&
           MPI_Wait(&k.pending, MPI_STATUS_IGNORE) == MPI_SUCCESS;
  }

  bool withdraw(ticket& k) noexcept { return abandon(k); }

  mpi_transport split(std::vector<int> const&, int color, int key, std::uint64_t,
                      communicator_options options, site where) {
    MPI_Comm part = MPI_COMM_NULL;
    check_mpi(MPI_Comm_split(held_.lanes[0], color, key, &part), "Comm_split", where);
    return mpi_transport(part, options, device_buffers_, where);
  }

  /// Messages in device memory: only what MPI does by itself.
  void admit(call const& c, bool wants_host) const {
    auto const refuse = [&](char const* why) {
      throw config_error("E-comm-037", c.where, name_of(c.what), " of ", name_of(c.type),
                         " in device memory: ", why, "; use comm::nccl, or host memory");
    };
    if (!device_buffers_) refuse("this communicator was made without mpi_options{.device_buffers = true}");
    if (c.reduces() && c.fixes_order()) refuse("MPI adds in its own order there: ask for summation::native");
    if (c.reduces() && (c.type == element::bf16 || c.type == element::fp16))
      refuse("MPI cannot add 16-bit floating-point numbers there");
    if (wants_host)
      refuse("start_X at the checked level, and a reduce_scatter into its own input, need host memory");
  }

  /// Throws config_error on all ranks where their options differ.
  void agree_on(communicator_options options, site where) {
    std::vector<communicator_terms> all(static_cast<std::size_t>(size_));
    communicator_terms const mine(options);
    check_mpi(MPI_Allgather_c(&mine, 2, MPI_DOUBLE, all.data(), 2, MPI_DOUBLE, held_.lanes[0]), "Allgather",
              where);
    compare_terms(all, rank_, where);
  }

private:
  static constexpr int status_tag = 1;

  explicit mpi_transport(MPI_Comm owned) noexcept { held_.lanes[0] = owned; }

  static MPI_Datatype type_of(element type) noexcept {
    MPI_Datatype const types[] = {MPI_BYTE,     MPI_UINT16_T, MPI_UINT16_T, MPI_FLOAT,   MPI_DOUBLE,
                                  MPI_INT8_T,   MPI_INT16_T,  MPI_INT32_T,  MPI_INT64_T, MPI_UINT8_T,
                                  MPI_UINT16_T, MPI_UINT32_T, MPI_UINT64_T};
    return types[static_cast<int>(type)];
  }
  MPI_Op operation_of(transfer const& t) const noexcept {
    auto const o = static_cast<int>(t.operation);
    if (t.type == element::bf16) return held_.operations[0][o];
    if (t.type == element::fp16) return held_.operations[1][o];
    return t.operation == reduction::sum ? MPI_SUM : t.operation == reduction::max ? MPI_MAX : MPI_MIN;
  }
  template <storage_scalar T>
  void make_operations(int type, site where) {
    MPI_User_function_c* const functions[] = {
        &reduce_pairs<T, reduction::sum>, &reduce_pairs<T, reduction::max>, &reduce_pairs<T, reduction::min>};
    for (int o = 0; o < 3; ++o)
      check_mpi(MPI_Op_create_c(functions[o], 1, &held_.operations[type][o]), "Op_create", where);
  }

  /// Counts and offsets as MPI wants them, in memory that outlives the call.
  struct placement {
    MPI_Count* counts = nullptr;
    MPI_Aint* offsets = nullptr;
  };
  placement place(index_t const* counts, int side, buffer<>& tables, site where) const {
    auto* base = room(tables, 4 * size_ * 8, {}, where);
    placement p{static_cast<MPI_Count*>(base) + 2 * side * size_,
                reinterpret_cast<MPI_Aint*>(static_cast<MPI_Count*>(base) + (2 * side + 1) * size_)};
    MPI_Aint offset = 0;
    for (int r = 0; r < size_; ++r) {
      p.counts[r] = counts[r];
      p.offsets[r] = offset;
      offset += counts[r];
    }
    return p;
  }

  /// Where this rank's part begins, in bytes.
  [[gnu::always_inline]] index_t my_part(transfer const& t, index_t const* counts) const noexcept {
    return offset_of(rank_, t.count, counts) * bytes_of(t.type);
  }
  /// The one MPI call of a transfer: blocking without `pending`.
  [[gnu::always_inline]] int post(transfer const& t, MPI_Request* pending, buffer<>& tables,
                                  site const& where) {
    auto const comm = held_.lanes[t.step > 0 ? 1 : 0];
    auto const type = type_of(t.type);
    bool const now = pending == nullptr;
    auto const n = MPI_Count{t.count};
    bool const at_root = rank_ == t.root;
    switch (t.what) {
    case collective::barrier:
      return now ? MPI_Barrier(comm) : MPI_Ibarrier(comm, pending);
    case collective::broadcast: {
      auto* data = at_root ? const_cast<void*>(t.in) : t.out;
      return now ? MPI_Bcast_c(data, n, type, t.root, comm)
                 : MPI_Ibcast_c(data, n, type, t.root, comm, pending);
    }
    case collective::reduce: {
      auto const* in = at_root && t.in == t.out ? MPI_IN_PLACE : t.in;
      auto const op = operation_of(t);
      return now ? MPI_Reduce_c(in, t.out, n, type, op, t.root, comm)
                 : MPI_Ireduce_c(in, t.out, n, type, op, t.root, comm, pending);
    }
    case collective::all_reduce: {
      auto const* in = t.in == t.out ? MPI_IN_PLACE : t.in;
      auto const op = operation_of(t);
      return now ? MPI_Allreduce_c(in, t.out, n, type, op, comm)
                 : MPI_Iallreduce_c(in, t.out, n, type, op, comm, pending);
    }
    case collective::reduce_scatter: {
      auto const op = operation_of(t);
      if (t.out_counts == nullptr)
        return now ? MPI_Reduce_scatter_block_c(t.in, t.out, n, type, op, comm)
                   : MPI_Ireduce_scatter_block_c(t.in, t.out, n, type, op, comm, pending);
      auto const parts = place(t.out_counts, 0, tables, where);
      return now ? MPI_Reduce_scatter_c(t.in, t.out, parts.counts, type, op, comm)
                 : MPI_Ireduce_scatter_c(t.in, t.out, parts.counts, type, op, comm, pending);
    }
    case collective::all_gather: {
      // In place on all ranks or on none, says MPI; ours may differ. So always, after the copy of this
      // rank's part that MPI would make.
      // (Device memory is MPI's to copy: there all ranks are to be in place, or none.)
      auto const* counts = t.out_counts;
      auto const mine = counts != nullptr ? counts[rank_] : t.count;
      auto* const place_of_mine = at(t.out, my_part(t, counts));
      if (!t.on_device) copy(place_of_mine, t.in, mine * bytes_of(t.type));
      auto const* in = t.on_device && t.in != place_of_mine ? t.in : MPI_IN_PLACE;
      if (counts == nullptr)
        return now ? MPI_Allgather_c(in, n, type, t.out, n, type, comm)
                   : MPI_Iallgather_c(in, n, type, t.out, n, type, comm, pending);
      auto const p = place(counts, 0, tables, where);
      return now ? MPI_Allgatherv_c(in, mine, type, t.out, p.counts, p.offsets, type, comm)
                 : MPI_Iallgatherv_c(in, mine, type, t.out, p.counts, p.offsets, type, comm, pending);
    }
    case collective::gather: {
      auto const* counts = t.out_counts;
      auto const* in = at_root && t.in == at(t.out, my_part(t, counts)) ? MPI_IN_PLACE : t.in;
      if (counts == nullptr)
        return now ? MPI_Gather_c(in, n, type, t.out, n, type, t.root, comm)
                   : MPI_Igather_c(in, n, type, t.out, n, type, t.root, comm, pending);
      auto const p = place(counts, 0, tables, where);
      auto const mine = p.counts[rank_];
      return now ? MPI_Gatherv_c(in, mine, type, t.out, p.counts, p.offsets, type, t.root, comm)
                 : MPI_Igatherv_c(in, mine, type, t.out, p.counts, p.offsets, type, t.root, comm, pending);
    }
    case collective::scatter: {
      auto const* counts = t.in_counts;
      auto* out = at_root && t.out == at(t.in, my_part(t, counts)) ? MPI_IN_PLACE : t.out;
      if (counts == nullptr)
        return now ? MPI_Scatter_c(t.in, n, type, out, n, type, t.root, comm)
                   : MPI_Iscatter_c(t.in, n, type, out, n, type, t.root, comm, pending);
      auto const p = place(counts, 0, tables, where);
      auto const mine = p.counts[rank_];
      return now ? MPI_Scatterv_c(t.in, p.counts, p.offsets, type, out, mine, type, t.root, comm)
                 : MPI_Iscatterv_c(t.in, p.counts, p.offsets, type, out, mine, type, t.root, comm, pending);
    }
    case collective::all_to_all: {
      if (t.in_counts == nullptr)
        return now ? MPI_Alltoall_c(t.in, n, type, t.out, n, type, comm)
                   : MPI_Ialltoall_c(t.in, n, type, t.out, n, type, comm, pending);
      auto const p = place(t.in_counts, 0, tables, where), q = place(t.out_counts, 1, tables, where);
      return now ? MPI_Alltoallv_c(t.in, p.counts, p.offsets, type, t.out, q.counts, q.offsets, type, comm)
                 : MPI_Ialltoallv_c(t.in, p.counts, p.offsets, type, t.out, q.counts, q.offsets, type, comm,
                                    pending);
    }
    case collective::send:
      return now ? MPI_Send_c(t.in, n, type, t.root, t.tag, comm)
                 : MPI_Isend_c(t.in, n, type, t.root, t.tag, comm, pending);
    case collective::receive:
      return MPI_Irecv_c(t.out, n, type, t.root, t.tag, comm, pending);
    case collective::split: // the engine sends it as all_gather
      break;
    }
    return MPI_ERR_OTHER;
  }

  /// The slices of a sum, unequal. MPICH's blocking Allgatherv passes long ones round in pieces of 32 KiB,
  /// each of which waits for the one before on every rank: with 4 ranks on 2 cores 0.4 s a MiB. Its other
  /// form does not.
  [[gnu::noinline]] void run_later_gather(transfer const& t, site const& where) {
    MPI_Request pending = MPI_REQUEST_NULL;
    check_mpi(post(t, &pending, tables_, where), name_of(t.what), where);
    check_mpi(MPI_Wait(&pending, MPI_STATUS_IGNORE), name_of(t.what), where);
  }

  static void check_length(transfer const& t, MPI_Status const& status, site const& where) {
    MPI_Count length = 0;
    check_mpi(MPI_Get_count_c(&status, type_of(t.type), &length), "Get_count", where);
    if (length != t.count)
      throw collective_mismatch("E-comm-013", where, "the two sides of a message differ: receive of ",
                                t.count, " ", name_of(t.type), " from rank ", t.root, " got ", length);
  }

  /// Tells all ranks what this one waits for, hears for a short while what they do, and throws.
  [[noreturn]] void give_up(signature const& sign, site where) {
    struct exchange {
      signature mine;
      std::vector<signature> theirs;
      std::vector<MPI_Request> sent, heard;
    };
    auto const n = static_cast<std::size_t>(size_);
    auto* const e = new exchange{sign, std::vector<signature>(n), {}, {}};
    e->sent.assign(n, MPI_REQUEST_NULL);
    e->heard.assign(n, MPI_REQUEST_NULL);
    std::vector<char> answered(n, 0);
    constexpr auto bytes = MPI_Count{sizeof(signature)};
    for (int r = 0; r < size_; ++r) {
      auto const i = static_cast<std::size_t>(r);
      if (r == rank_) continue; // a call that fails here is a rank that does not answer
      if (MPI_Irecv_c(&e->theirs[i], bytes, MPI_BYTE, r, status_tag, held_.lanes[1], &e->heard[i]) !=
              MPI_SUCCESS ||
          MPI_Isend_c(&e->mine, bytes, MPI_BYTE, r, status_tag, held_.lanes[1], &e->sent[i]) != MPI_SUCCESS)
        continue;
    }
    auto const grace = stall_limit_ < 1 ? stall_limit_ : 1.0;
    auto open = n - 1;
    for (auto const start = MPI_Wtime(); open > 0 && MPI_Wtime() - start < grace; ::sched_yield())
      for (std::size_t r = 0; r < n; ++r) {
        int ended = 0;
        if (answered[r] != 0 || e->heard[r] == MPI_REQUEST_NULL) continue;
        if (MPI_Test(&e->heard[r], &ended, MPI_STATUS_IGNORE) != MPI_SUCCESS || ended == 0) continue;
        answered[r] = 1;
        --open;
      }
    bool ended = true; // whether MPI is done with the memory of the exchange
    for (std::size_t r = 0; r < n; ++r) {
      int sent = 1;
      if (e->sent[r] != MPI_REQUEST_NULL)
        ended = MPI_Test(&e->sent[r], &sent, MPI_STATUS_IGNORE) == MPI_SUCCESS && sent != 0 && ended;
      if (e->heard[r] != MPI_REQUEST_NULL)
        ended = MPI_Cancel(&e->heard[r]) == MPI_SUCCESS &&
                MPI_Wait(&e->heard[r], MPI_STATUS_IGNORE) == MPI_SUCCESS && ended;
    }
    auto const text = tessera::text_of("rank ", rank_, " of ", size_, " gave up ", text_of(sign),
                                       " (the limit is ", stall_limit_, " s); it waited for ",
                                       missing_ranks(sign, rank_, e->theirs, answered));
    if (ended) delete e;
    throw stalled("E-comm-021", where, text);
  }

  struct held {
    MPI_Comm lanes[2] = {MPI_COMM_NULL, MPI_COMM_NULL};
    MPI_Op operations[2][3] = {{MPI_OP_NULL, MPI_OP_NULL, MPI_OP_NULL},
                               {MPI_OP_NULL, MPI_OP_NULL, MPI_OP_NULL}};
  };
  int rank_ = 0, size_ = 1;
  held held_;
  buffer<> tables_;
  double stall_limit_ = 0;
  bool device_buffers_ = false;
};

} // namespace tessera::inline TESSERA_ABI::comm::detail

#endif
