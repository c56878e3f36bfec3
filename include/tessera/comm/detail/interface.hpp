/// The typed calls of every communicator, written once: lengths checked, the call described, metered, and
/// handed to the engine. The contract of each stands at `comm::communicator`.
#ifndef TESSERA_COMM_DETAIL_INTERFACE_HPP
#define TESSERA_COMM_DETAIL_INTERFACE_HPP

#include <ctime>
#include <vector>

#include <tessera/comm/detail/combine.hpp>
#include <tessera/comm/detail/engine.hpp>

namespace tessera::inline TESSERA_ABI::comm::detail {

inline double seconds_now() noexcept {
  std::timespec now{};
  ::clock_gettime(CLOCK_MONOTONIC, &now);
  return static_cast<double>(now.tv_sec) + 1e-9 * static_cast<double>(now.tv_nsec);
}

/// Adds the time of a scope to a meter that wants it.
class timed_scope {
public:
  timed_scope(traffic_meter& meter, collective what) noexcept
      : meter_(meter), what_(what), start_(meter.times_calls() ? seconds_now() : 0) {}
  ~timed_scope() {
    if (meter_.times_calls()) meter_.add_time(what_, seconds_now() - start_);
  }
  timed_scope(timed_scope const&) = delete;
  timed_scope& operator=(timed_scope const&) = delete;

private:
  traffic_meter& meter_;
  collective what_;
  double start_;
};

/// A call under way; owns what was lent to it. Move-only. wait() returns when it has ended, test() says
/// whether it has; both throw what it ended with, once; afterwards, and by default, it is empty and both
/// return at once. Destroying an unfinished request waits for it; while an exception unwinds, which may be
/// the reason why it can never finish, it is abandoned instead: nobody waits, and its communicator is lost.
template <transport T>
class request {
public:
  request() = default;
  request(engine<T>& owner, operation<T>& one) noexcept : owner_(&owner), one_(&one) {}
  request(request&& other) noexcept : owner_(other.owner_), one_(other.one_) { other.one_ = nullptr; }
  request& operator=(request&& other) noexcept {
    if (this != &other) {
      dispose();
      owner_ = other.owner_;
      one_ = other.one_;
      other.one_ = nullptr;
    }
    return *this;
  }
  ~request() { dispose(); }

  void wait() {
    if (one_ == nullptr) return;
    timed_scope timer(owner_->meter, one_->request.what);
    auto* const one = one_;
    one_ = nullptr;
    owner_->complete(*one);
  }
  bool test() {
    if (one_ == nullptr) return true;
    timed_scope timer(owner_->meter, one_->request.what);
    if (!one_->finished) owner_->progress();
    if (!one_->finished) return false;
    auto* const one = one_;
    one_ = nullptr;
    owner_->free(*one);
    return true;
  }

private:
  void dispose() noexcept {
    if (one_ == nullptr) return;
    if (!one_->finished && std::uncaught_exceptions() > one_->unwinding) {
      owner_->abandon(*one_);
    } else {
      try {
        wait();
      } catch (...) { // a destructor can't say so; the next call on the communicator does
        owner_->lose();
      }
    }
    one_ = nullptr;
  }

  engine<T>* owner_ = nullptr;
  operation<T>* one_ = nullptr;
};

/// Inputs do not take part in deduction: spans of mutable elements and containers convert.
template <class S>
using input_span = std::type_identity_t<std::span<S const>>;
using counts_span = std::span<index_t const>;

/// `Derived` is the communicator: constructible from an engine (what split makes).
template <class Derived, transport T>
class interface {
public:
  using request = detail::request<T>;

  interface(interface&& other) noexcept : engine_(other.engine_) {
    other.engine_ = nullptr;
  }
  interface& operator=(interface&& other) noexcept {
    auto* const mine = engine_;
    engine_ = other.engine_;
    other.engine_ = mine;
    return *this;
  }
  ~interface() { delete engine_; }

  int rank() const noexcept { return engine_->transport.rank(); }
  int size() const noexcept { return engine_->transport.size(); }
  communicator_options options() const noexcept { return engine_->options; }
  traffic_meter& meter() noexcept { return engine_->meter; }
  traffic_meter const& meter() const noexcept { return engine_->meter; }
  /// From now on memory for exchanges is counted here.
  void count_memory(memory_meter& meter) noexcept { engine_->account = {&meter, memory_kind::communication}; }
  /// An upper bound of the memory that one all_reduce, reduce or reduce_scatter of n T in rank_order keeps at
  /// the unchecked level; calls one after another share it, requests in flight at once have one each.
  template <reducible_scalar R>
  static constexpr index_t scratch_bytes(index_t n, int ranks) noexcept {
    constexpr auto item = static_cast<index_t>(sizeof(R));
    auto const whole = n * item <= whole_vector_bytes ? ranks * n * item : 0;
    auto const slices = ranks * ((n + ranks - 1) / ranks) * item;
    return (whole > slices ? whole : slices) + table_layout{ranks, false, false}.bytes();
  }

  void barrier(site where = site::here()) { block(named(collective::barrier, where)); }

  template <message_scalar S>
  void broadcast(std::span<S> data, int root, site where = site::here()) {
    block(make_broadcast(data, root, where));
  }
  template <message_scalar S>
  [[nodiscard]] request start_broadcast(std::span<S> data, int root, site where = site::here()) {
    return start(make_broadcast(data, root, where));
  }

  template <reducible_scalar S>
  void reduce(std::span<S> out, input_span<S> in, int root, reduce_options how = {},
              site where = site::here()) {
    block(make_reduce(out, in, root, how, where));
  }

  template <reducible_scalar S>
  void all_reduce(std::span<S> in_out, reduce_options how = {}, site where = site::here()) {
    block(make_all_reduce<S>(in_out, in_out, how, where));
  }
  template <reducible_scalar S>
  void all_reduce(std::span<S> out, input_span<S> in, reduce_options how = {}, site where = site::here()) {
    block(make_all_reduce<S>(out, in, how, where));
  }
  template <reducible_scalar S>
  [[nodiscard]] S all_reduce(S value, reduce_options how = {}, site where = site::here()) {
    block(make_all_reduce<S>({&value, 1}, std::span<S const>(&value, 1), how, where));
    return value;
  }
  template <reducible_scalar S>
  [[nodiscard]] request start_all_reduce(std::span<S> in_out, reduce_options how = {},
                                         site where = site::here()) {
    return start(make_all_reduce<S>(in_out, in_out, how, where));
  }
  template <reducible_scalar S>
  [[nodiscard]] request start_all_reduce(std::span<S> out, input_span<S> in, reduce_options how = {},
                                         site where = site::here()) {
    return start(make_all_reduce<S>(out, in, how, where));
  }

  template <reducible_scalar S>
  void reduce_scatter(std::span<S> out, input_span<S> in, reduce_options how = {},
                      site where = site::here()) {
    block(make_reduce_scatter<S>(out, in, nullptr, how, where));
  }
  template <reducible_scalar S>
  void reduce_scatter_v(std::span<S> out, input_span<S> in, counts_span counts, reduce_options how = {},
                        site where = site::here()) {
    block(make_reduce_scatter<S>(out, in, &counts, how, where));
  }
  template <reducible_scalar S>
  [[nodiscard]] request start_reduce_scatter(std::span<S> out, input_span<S> in, reduce_options how = {},
                                             site where = site::here()) {
    return start(make_reduce_scatter<S>(out, in, nullptr, how, where));
  }
  template <reducible_scalar S>
  [[nodiscard]] request start_reduce_scatter_v(std::span<S> out, input_span<S> in, counts_span counts,
                                               reduce_options how = {}, site where = site::here()) {
    return start(make_reduce_scatter<S>(out, in, &counts, how, where));
  }

  template <message_scalar S>
  void all_gather(std::span<S> out, input_span<S> in, site where = site::here()) {
    block(make_gather<S>(collective::all_gather, out, in, nullptr, -1, where));
  }
  template <message_scalar S>
  void all_gather_v(std::span<S> out, input_span<S> in, counts_span counts, site where = site::here()) {
    block(make_gather<S>(collective::all_gather, out, in, &counts, -1, where));
  }
  template <message_scalar S>
  [[nodiscard]] request start_all_gather(std::span<S> out, input_span<S> in, site where = site::here()) {
    return start(make_gather<S>(collective::all_gather, out, in, nullptr, -1, where));
  }
  template <message_scalar S>
  [[nodiscard]] request start_all_gather_v(std::span<S> out, input_span<S> in, counts_span counts,
                                           site where = site::here()) {
    return start(make_gather<S>(collective::all_gather, out, in, &counts, -1, where));
  }
  template <message_scalar S>
  void gather(std::span<S> out, input_span<S> in, int root, site where = site::here()) {
    block(make_gather<S>(collective::gather, out, in, nullptr, root, where));
  }
  template <message_scalar S>
  void gather_v(std::span<S> out, input_span<S> in, counts_span counts, int root, site where = site::here()) {
    block(make_gather<S>(collective::gather, out, in, &counts, root, where));
  }

  template <message_scalar S>
  void scatter(std::span<S> out, input_span<S> in, int root, site where = site::here()) {
    block(make_scatter<S>(out, in, nullptr, root, where));
  }
  template <message_scalar S>
  void scatter_v(std::span<S> out, input_span<S> in, counts_span counts, int root,
                 site where = site::here()) {
    block(make_scatter<S>(out, in, &counts, root, where));
  }

  template <message_scalar S>
  void all_to_all(std::span<S> out, input_span<S> in, site where = site::here()) {
    block(make_all_to_all<S>(out, nullptr, in, nullptr, where));
  }
  template <message_scalar S>
  void all_to_all_v(std::span<S> out, counts_span out_counts, input_span<S> in, counts_span in_counts,
                    site where = site::here()) {
    block(make_all_to_all<S>(out, &out_counts, in, &in_counts, where));
  }
  template <message_scalar S>
  [[nodiscard]] request start_all_to_all(std::span<S> out, input_span<S> in, site where = site::here()) {
    return start(make_all_to_all<S>(out, nullptr, in, nullptr, where));
  }
  template <message_scalar S>
  [[nodiscard]] request start_all_to_all_v(std::span<S> out, counts_span out_counts, input_span<S> in,
                                           counts_span in_counts, site where = site::here()) {
    return start(make_all_to_all<S>(out, &out_counts, in, &in_counts, where));
  }

  template <class S>
    requires message_scalar<std::remove_const_t<S>>
  void send(std::span<S> data, int to, int tag, site where = site::here()) {
    block(make_message<std::remove_const_t<S>>(collective::send, {}, data, to, tag, where));
  }
  template <message_scalar S>
  void receive(std::span<S> data, int from, int tag, site where = site::here()) {
    block(make_message<S>(collective::receive, data, {}, from, tag, where));
  }
  template <class S>
    requires message_scalar<std::remove_const_t<S>>
  [[nodiscard]] request start_send(std::span<S> data, int to, int tag, site where = site::here()) {
    return start(make_message<std::remove_const_t<S>>(collective::send, {}, data, to, tag, where));
  }
  template <message_scalar S>
  [[nodiscard]] request start_receive(std::span<S> data, int from, int tag, site where = site::here()) {
    return start(make_message<S>(collective::receive, data, {}, from, tag, where));
  }

  [[nodiscard]] Derived split(int color, int key, site where = site::here()) {
    if (color < 0)
      throw config_error("E-comm-004", where, "split: color ", color, " on rank ", rank(),
                         ", need 0 or more");
    auto const ranks = static_cast<std::size_t>(size());
    std::int32_t const mine[2] = {color, key};
    std::vector<std::int32_t> all(2 * ranks);
    auto c = make_gather<std::int32_t>(collective::all_gather, all, mine, nullptr, -1, where);
    c.what = collective::split;
    block(c);
    std::vector<int> members; // ranks of my color, by key, then by rank
    for (int r = 0; r < size(); ++r) {
      if (all[2 * static_cast<std::size_t>(r)] != color) continue;
      auto place = members.end();
      while (place != members.begin() &&
             all[2 * static_cast<std::size_t>(place[-1]) + 1] > all[2 * static_cast<std::size_t>(r) + 1])
        --place;
      members.insert(place, r);
    }
    std::int64_t const parts[] = {static_cast<std::int64_t>(engine_->group), engine_->sequence, color};
    auto const group = digest_of(parts, sizeof parts);
    return Derived(
        new engine<T>(engine_->transport.split(members, color, key, group, engine_->options, where),
                      engine_->options, group));
  }

protected:
  explicit interface(engine<T>* owned) noexcept : engine_(owned) {}
  engine<T>& core() noexcept { return *engine_; }

private:
  // What can be said of a call before it is made. Each returns its description or throws size_error.

  template <message_scalar S>
  static call describe(collective what, std::span<S> out, std::span<S const> in, site where) noexcept {
    auto c = named(what, where);
    c.type = element_of<S>();
    c.in = in.data();
    c.out = out.data();
    c.in_items = static_cast<index_t>(in.size());
    c.out_items = static_cast<index_t>(out.size());
    return c;
  }
  static call named(collective what, site where) noexcept {
    call c;
    c.what = what;
    c.where = where;
    return c;
  }
  void expect(index_t items, index_t expected, char const* which, collective what, site where) const {
    if (items != expected)
      throw size_error("E-comm-001", where, name_of(what), ": `", which, "` has ", items,
                       " elements on rank ", rank(), " of ", size(), ", need ", expected);
  }
  void check_rank(int root, char const* which, collective what, site where) const {
    if (root < 0 || root >= size())
      throw size_error("E-comm-002", where, name_of(what), ": `", which, "` is ", root, " on rank ", rank(),
                       ", need 0 to ", size() - 1);
  }
  index_t sum_of(counts_span counts, char const* which, collective what, site where) const {
    expect(static_cast<index_t>(counts.size()), size(), which, what, where);
    index_t sum = 0;
    for (auto each : counts)
      if (each < 0 || __builtin_add_overflow(sum, each, &sum))
        throw size_error("E-comm-003", where, name_of(what), ": `", which, "` on rank ", rank(),
                         " has an impossible count, ", each);
    return sum;
  }
  index_t times_size(index_t items, char const* which, collective what, site where) const {
    index_t product = 0;
    if (__builtin_mul_overflow(items, index_t{size()}, &product))
      throw size_error("E-comm-003", where, name_of(what), ": `", which, "` of ", items, " elements on ",
                       size(), " ranks is more than 2^63 - 1 elements");
    return product;
  }
  /// `out` may begin `offset` elements before `in` does, and not overlap it otherwise.
  void forbid_overlap(call const& c, index_t offset, site where) const {
    auto const item = bytes_of(c.type);
    auto const distance = reinterpret_cast<std::intptr_t>(c.in) - reinterpret_cast<std::intptr_t>(c.out);
    if (distance != offset * item && overlap(c.in, c.in_items * item, c.out, c.out_items * item))
      refuse_overlap(c, where);
  }
  [[noreturn]] void refuse_overlap(call const& c, site where) const {
    throw size_error("E-comm-005", where, name_of(c.what), ": `in` and `out` overlap on rank ", rank(),
                     " in a way that this call does not allow");
  }

  template <message_scalar S>
  call make_broadcast(std::span<S> data, int root, site where) const {
    check_rank(root, "root", collective::broadcast, where);
    auto c = rank() == root ? describe<S>(collective::broadcast, {}, data, where)
                            : describe<S>(collective::broadcast, data, {}, where);
    c.count = static_cast<index_t>(data.size());
    c.root = root;
    return c;
  }
  template <reducible_scalar S>
  static void reduce_with(call& c, reduce_options how) noexcept {
    c.operation = how.operation;
    c.order = how.order;
    c.combine = &combine<S>;
  }
  template <reducible_scalar S>
  call make_reduce(std::span<S> out, std::span<S const> in, int root, reduce_options how, site where) const {
    check_rank(root, "root", collective::reduce, where);
    if (rank() != root) out = {};
    auto c = describe<S>(collective::reduce, out, in, where);
    if (rank() == root) expect(c.out_items, c.in_items, "out", c.what, where);
    forbid_overlap(c, 0, where);
    c.count = c.in_items;
    c.root = root;
    reduce_with<S>(c, how);
    return c;
  }
  template <reducible_scalar S>
  call make_all_reduce(std::span<S> out, std::span<S const> in, reduce_options how, site where) const {
    auto c = describe<S>(collective::all_reduce, out, in, where);
    expect(c.out_items, c.in_items, "out", c.what, where);
    forbid_overlap(c, 0, where);
    c.count = c.in_items;
    reduce_with<S>(c, how);
    return c;
  }
  template <reducible_scalar S>
  call make_reduce_scatter(std::span<S> out, std::span<S const> in, counts_span const* counts,
                           reduce_options how, site where) const {
    auto c = describe<S>(collective::reduce_scatter, out, in, where);
    if (counts != nullptr) {
      c.count = sum_of(*counts, "counts", c.what, where);
      c.in_counts = counts->data();
      expect(c.in_items, c.count, "in", c.what, where);
      expect(c.out_items, c.in_counts[rank()], "out", c.what, where);
    } else {
      c.count = c.out_items;
      expect(c.in_items, times_size(c.out_items, "out", c.what, where), "in", c.what, where);
    }
    reduce_with<S>(c, how);
    return c;
  }
  template <message_scalar S>
  call make_gather(collective what, std::span<S> out, std::span<S const> in, counts_span const* counts,
                   int root, site where) const {
    bool const receives = what == collective::all_gather || rank() == root;
    if (what == collective::gather) check_rank(root, "root", what, where);
    if (!receives) out = {};
    auto c = describe<S>(what, out, in, where);
    c.root = root;
    c.count = c.in_items;
    auto all = times_size(c.in_items, "in", what, where);
    if (counts != nullptr) {
      c.count = all = sum_of(*counts, "counts", what, where);
      c.in_counts = counts->data();
      expect(c.in_items, c.in_counts[rank()], "in", what, where);
    }
    if (receives) expect(c.out_items, all, "out", what, where);
    forbid_overlap(c, my_offset(c), where);
    return c;
  }
  template <message_scalar S>
  call make_scatter(std::span<S> out, std::span<S const> in, counts_span const* counts, int root,
                    site where) const {
    constexpr auto what = collective::scatter;
    check_rank(root, "root", what, where);
    if (rank() != root) in = {};
    auto c = describe<S>(what, out, in, where);
    c.root = root;
    c.count = c.out_items;
    auto all = times_size(c.out_items, "out", what, where);
    if (counts != nullptr) {
      c.count = all = sum_of(*counts, "counts", what, where);
      c.in_counts = counts->data();
      expect(c.out_items, c.in_counts[rank()], "out", what, where);
    }
    if (rank() == root) expect(c.in_items, all, "in", what, where);
    forbid_overlap(c, -my_offset(c), where);
    return c;
  }
  index_t my_offset(call const& c) const noexcept { return offset_of(rank(), c.count, c.in_counts); }
  template <message_scalar S>
  call make_all_to_all(std::span<S> out, counts_span const* out_counts, std::span<S const> in,
                       counts_span const* in_counts, site where) const {
    constexpr auto what = collective::all_to_all;
    auto c = describe<S>(what, out, in, where);
    if (in_counts != nullptr) {
      expect(c.out_items, sum_of(*out_counts, "out_counts", what, where), "out", what, where);
      expect(c.in_items, sum_of(*in_counts, "in_counts", what, where), "in", what, where);
      c.in_counts = in_counts->data();
      c.out_counts = out_counts->data();
    } else {
      c.count = c.in_items / size();
      expect(c.in_items, c.count * size(), "in", what, where);
      expect(c.out_items, c.in_items, "out", what, where);
    }
    if (auto const item = bytes_of(c.type); overlap(c.in, c.in_items * item, c.out, c.out_items * item))
      refuse_overlap(c, where);
    return c;
  }
  template <message_scalar S>
  call make_message(collective what, std::span<S> out, std::span<S const> in, int peer, int tag,
                    site where) const {
    check_rank(peer, what == collective::send ? "to" : "from", what, where);
    if (tag < 0 || tag > 32767)
      throw size_error("E-comm-006", where, name_of(what), ": `tag` is ", tag, " on rank ", rank(),
                       ", need 0 to 32767");
    auto c = describe<S>(what, out, in, where);
    c.count = c.in_items + c.out_items;
    c.root = peer;
    c.tag = tag;
    return c;
  }

  void meter_call(call const& c) noexcept {
    engine_->meter.count(c.what, (c.in_items > c.out_items ? c.in_items : c.out_items) * bytes_of(c.type));
  }
  /// Always inlined: every field of `c` is known here, so that a plain call is the transport's one call.
  [[gnu::always_inline]] void block(call const& c) {
    timed_scope timer(engine_->meter, c.what);
    meter_call(c);
    if constexpr (direct_transport<T>)
      if (engine_->plain() && !(c.reduces() && c.order == summation::rank_order)) {
        if (!c.is_point_to_point()) ++engine_->sequence;
        return engine_->transport.run(transfer_of(c));
      }
    engine_->complete(engine_->begin(c, true));
  }
  request start(call const& c) {
    timed_scope timer(engine_->meter, c.what);
    meter_call(c);
    return request(*engine_, engine_->begin(c, false));
  }

  engine<T>* engine_;
};

} // namespace tessera::inline TESSERA_ABI::comm::detail

#endif
