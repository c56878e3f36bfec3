/// How a call is carried out over a transport, written once for all models: signatures compared, buffers
/// guarded, a fixed order of sums as exchange, sum and collect, and the order in which steps of several calls
/// may go.
#ifndef TESSERA_COMM_DETAIL_OPERATION_HPP
#define TESSERA_COMM_DETAIL_OPERATION_HPP

#include <exception>

#include <tessera/comm/detail/rank_order.hpp>

namespace tessera::inline TESSERA_ABI::comm::detail {

/// Moves bytes between ranks.
/// - start(t, ticket) begins a transfer, test(ticket) says whether it has ended; buffers stay in use between.
/// - pause(patience, sign, where) returns when testing again may help; throws stalled past the limit.
/// - abandon(ticket) gives a transfer up; false: the other side may still touch its buffers.
/// - withdraw(ticket) takes a receive back that has not been matched.
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
  { t.withdraw(ticket) } -> std::same_as<bool>;
};

/// A transport whose blocking calls are better than start and test: run(t, where) and wait(ticket).
template <class T>
concept direct_transport = transport<T> && requires(T& t, transfer const& step, typename T::ticket& ticket) {
  t.run(step, step.where);
  t.wait(ticket);
};

/// A transport that also takes messages in a device's memory: admit(call, wants_host) throws where it can't
/// do this call there; wants_host: the call would need the host to touch the buffers.
template <class T>
concept device_transport = transport<T> && requires(T& t, call const& c) {
  t.admit(c, true);
};

/// Memory that grows to what it is asked for and is kept: nothing is allocated once sizes repeat.
template <memory_space Memory>
void* room(buffer<Memory>& memory, index_t bytes, memory_account account, site where) {
  if (memory.bytes() < bytes) {
    memory = buffer<Memory>();
    memory = buffer<Memory>(bytes, account, where);
  }
  return memory.data();
}

/// Native reductions cannot write into what they read: such an output is delivered at the end. (Inlined
/// always: a call that is looked at from elsewhere must stand in memory.)
[[gnu::always_inline]] inline bool needs_staging(call const& c) noexcept {
  auto const item = bytes_of(c.type);
  return c.what == collective::reduce_scatter && overlap(c.in, c.in_items * item, c.out, c.out_items * item);
}

/// All bits set: NaN in every floating-point type, -1 or the largest value in integers.
inline constexpr int poison = 0xff;

/// What the checked level does with lent memory, in the host's.
struct host_store {
  using memory = host_memory;

  static void copy(void* to, void const* from, index_t bytes) noexcept { detail::copy(to, from, bytes); }
  static void poison(void* to, index_t bytes) noexcept {
    std::memset(to, detail::poison, static_cast<std::size_t>(bytes));
  }
  /// The first byte that is no longer poison, or -1.
  static index_t first_written(void const* lent, index_t bytes) noexcept {
    auto const* at = static_cast<unsigned char const*>(lent);
    for (index_t i = 0; i < bytes; ++i)
      if (at[i] != detail::poison) return i;
    return -1;
  }
  static std::uint64_t digest(void const* data, index_t bytes) noexcept {
    return digest_of(data, static_cast<std::size_t>(bytes));
  }
};

/// At the checked level a request works on staged copies of its outputs; the caller's read as NaN until the
/// request has ended, and inputs are watched for changes.
struct loan {
  void* out = nullptr;
  void const* in = nullptr; // null: not watched
  index_t out_bytes = 0, in_bytes = 0;
  std::uint64_t digest = 0;

  bool any() const noexcept { return out != nullptr || in != nullptr; }

  /// `c` is changed to the copies, which are made in `staged`.
  template <class Store>
  void lend(Store store, call& c, buffer<typename Store::memory>& staged, memory_account account) {
    auto const given = c.in == nullptr ? 0 : c.in_items * bytes_of(c.type);
    auto const wanted = c.out == nullptr ? 0 : c.out_items * bytes_of(c.type);
    bool const shared = overlap(c.in, given, c.out, wanted);
    auto* copies = room(staged, wanted + (shared ? given : 0), account, c.where);
    if (shared) {
      store.copy(at(copies, wanted), c.in, given);
      c.in = at(copies, wanted);
    } else if (given > 0) {
      in = c.in;
      in_bytes = given;
      digest = store.digest(in, given);
    }
    if (wanted > 0) {
      out = c.out;
      out_bytes = wanted;
      c.out = copies;
      store.poison(out, wanted);
    }
  }

  /// Ends it: the outputs are delivered from `staged` if nobody touched what was lent.
  template <class Store>
  void give_back(Store store, signature const& sign, void const* staged, site where) const {
    if (auto const written = store.first_written(out, out_bytes); written >= 0)
      throw error("E-comm-014", where, "the output of ", text_of(sign), " was written to (byte ", written,
                  ") before its request was waited for; it is lent until then");
    if (in != nullptr && store.digest(in, in_bytes) != digest)
      throw error("E-comm-015", where, "the input of ", text_of(sign),
                  " changed before its request was waited for; it is lent until then");
    if (out_bytes > 0) store.copy(out, staged, out_bytes);
  }
};

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
  bool delivers = false; // `staged` holds the output of a native reduction
  std::exception_ptr error;
  int unwinding = 0; // exceptions in flight when it was made

  buffer<> pieces; // what the ranks sent, to be combined
  buffer<> tables; // counts and what is compared
  buffer<> staged; // stands in for the caller's buffers at the checked level
  loan lent;

  operation* next = nullptr;

  void reset(call const& c, bool is_blocking) {
    request = c;
    at = stage::data;
    steps = 0;
    blocking = is_blocking;
    in_transit = settled = finished = delivers = false;
    error = nullptr;
    unwinding = std::uncaught_exceptions();
    lent = {};
    next = nullptr;
  }
  bool in_fixed_order() const noexcept { return request.reduces() && (request.fixes_order() || !T::reduces); }
};

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
