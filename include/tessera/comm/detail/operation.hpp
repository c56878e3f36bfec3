/// How a call is carried out over a transport, written once for all models: signatures compared, buffers
/// guarded, rank_order as exchange, sum and collect, and the order in which steps of several calls may go.
#ifndef TESSERA_COMM_DETAIL_OPERATION_HPP
#define TESSERA_COMM_DETAIL_OPERATION_HPP

#include <exception>

#include <tessera/comm/detail/call.hpp>

namespace tessera::inline TESSERA_ABI::comm::detail {

/// Moves bytes between ranks.
/// - start(t, ticket) begins a transfer, test(ticket) says whether it has ended; buffers stay in use between.
/// - pause(patience, sign, where) returns when testing again may help; throws stalled past the limit.
/// - abandon(ticket) gives a transfer up; false: the other side may still touch its buffers.
/// - checks_signatures: start and test compare signatures themselves; reduces: there is a native reduction.
template <class T>
concept transport = requires(T& t, T const& constant, transfer const& step, typename T::ticket& ticket,
                             typename T::patience& patience, signature const& sign) {
  { constant.rank() } -> std::same_as<int>;
  { constant.size() } -> std::same_as<int>;
  { T::checks_signatures } -> std::convertible_to<bool>;
  { T::reduces } -> std::convertible_to<bool>;
  t.start(step, ticket);
  { t.test(ticket) } -> std::same_as<bool>;
  requires std::constructible_from<typename T::patience, T&>;
  t.pause(patience, sign, step.where);
  { t.abandon(ticket) } -> std::same_as<bool>;
};

/// A transport whose blocking calls are better than start and test: run(t) and wait(ticket).
template <class T>
concept direct_transport = transport<T> && requires(T& t, transfer const& step, typename T::ticket& ticket) {
  t.run(step);
  t.wait(ticket);
};

/// Memory that grows to what it is asked for and is kept: nothing is allocated once sizes repeat.
inline void* room(buffer<>& memory, index_t bytes, memory_account account, site where) {
  if (memory.bytes() < bytes) {
    memory = buffer<>();
    memory = buffer<>(bytes, account, where);
  }
  return memory.data();
}

/// Element at which slice `rank` of n elements over `ranks` begins.
constexpr index_t slice_begin(index_t n, int ranks, int rank) noexcept {
  auto const extra = n % ranks;
  return n / ranks * rank + (rank < extra ? rank : extra);
}

/// Up to here an all_reduce in rank_order sends whole vectors to all, one message instead of two.
inline constexpr index_t whole_vector_bytes = 2048;

/// Native reductions cannot write into what they read: such an output is delivered at the end.
inline bool needs_staging(call const& c) noexcept {
  auto const item = bytes_of(c.type);
  return c.what == collective::reduce_scatter && overlap(c.in, c.in_items * item, c.out, c.out_items * item);
}

/// A call under way.
template <transport T>
struct operation {
  enum class stage : std::uint8_t { signatures, counts, data, flags, collect };

  call request;
  signature sign;
  typename T::ticket ticket{};
  stage at = stage::data;
  int steps = 0;           // issued so far
  bool blocking = false;   // the caller waits at once
  bool in_transit = false; // the ticket is in use
  bool settled = false;    // all steps are issued
  bool finished = false;
  bool whole = false;    // rank_order by whole vectors
  bool delivers = false; // `staged` holds the output of a native reduction
  std::exception_ptr error;
  int unwinding = 0; // exceptions in flight when it was made

  buffer<> pieces; // what the ranks sent, to be combined
  buffer<> tables; // counts and what is compared
  buffer<> staged; // stands in for the caller's buffers at the checked level
  void* lent_out = nullptr;
  void const* lent_in = nullptr; // null: not watched
  index_t lent_out_bytes = 0, lent_in_bytes = 0;
  std::uint64_t lent_digest = 0;

  operation* next = nullptr;

  void reset(call const& c, bool is_blocking) {
    request = c;
    at = stage::data;
    steps = 0;
    blocking = is_blocking;
    in_transit = settled = finished = whole = delivers = false;
    error = nullptr;
    unwinding = std::uncaught_exceptions();
    forget_loans();
    next = nullptr;
  }
  void forget_loans() noexcept {
    lent_out = nullptr;
    lent_in = nullptr;
    lent_out_bytes = lent_in_bytes = 0;
  }
  bool in_rank_order() const noexcept {
    return request.reduces() && (request.order == summation::rank_order || !T::reduces);
  }
};

/// All bits set: NaN in every floating-point type, -1 or the largest value in integers.
inline constexpr int poison = 0xff;

/// At the checked level a request works on staged copies of its outputs; the caller's read as NaN until the
/// request has ended, and inputs are watched for changes.
template <transport T>
void lend(operation<T>& op, memory_account account) {
  auto& c = op.request;
  auto const in_bytes = c.in == nullptr ? 0 : c.in_items * bytes_of(c.type);
  auto const out_bytes = c.out == nullptr ? 0 : c.out_items * bytes_of(c.type);
  bool const shared = overlap(c.in, in_bytes, c.out, out_bytes);
  auto* copies = room(op.staged, out_bytes + (shared ? in_bytes : 0), account, c.where);
  if (shared) {
    copy(at(copies, out_bytes), c.in, in_bytes);
    c.in = at(copies, out_bytes);
  } else if (in_bytes > 0) {
    op.lent_in = c.in;
    op.lent_in_bytes = in_bytes;
    op.lent_digest = digest_of(c.in, static_cast<std::size_t>(in_bytes));
  }
  if (out_bytes > 0) {
    op.lent_out = c.out;
    op.lent_out_bytes = out_bytes;
    c.out = copies;
    std::memset(op.lent_out, poison, static_cast<std::size_t>(out_bytes));
  }
}

/// Ends what `lend` began: the outputs are delivered if nobody touched what was lent.
template <transport T>
void give_back(operation<T>& op) {
  auto const* lent = static_cast<unsigned char const*>(op.lent_out);
  for (index_t i = 0; i < op.lent_out_bytes; ++i)
    if (lent[i] != poison)
      throw error("E-comm-014", op.request.where, "the output of ", text_of(op.sign),
                  " was written to (byte ", i, ") before its request was waited for; it is lent until then");
  if (op.lent_in != nullptr &&
      digest_of(op.lent_in, static_cast<std::size_t>(op.lent_in_bytes)) != op.lent_digest)
    throw error("E-comm-015", op.request.where, "the input of ", text_of(op.sign),
                " changed before its request was waited for; it is lent until then");
  if (op.lent_out_bytes > 0) copy(op.lent_out, op.staged.data(), op.lent_out_bytes);
}

/// The tables of an operation, in elements of index_t: what each rank gets of me and I of each; the caller's
/// counts, copied; a flag of each rank; at the checked level all ranks' counts, and all ranks' signatures.
struct table_layout {
  index_t ranks;
  bool checked, own_counts;

  index_t sends() const noexcept { return 0; }
  index_t receives() const noexcept { return ranks; }
  index_t given() const noexcept { return 2 * ranks; }
  index_t flags() const noexcept { return 4 * ranks; }
  index_t all_counts() const noexcept { return 5 * ranks; }
  index_t signatures() const noexcept {
    return all_counts() + (checked && own_counts ? 2 * ranks * ranks : 0);
  }
  index_t bytes() const noexcept {
    return signatures() * static_cast<index_t>(sizeof(index_t)) +
           (checked ? ranks * static_cast<index_t>(sizeof(signature)) : 0);
  }
};

} // namespace tessera::inline TESSERA_ABI::comm::detail

#endif
