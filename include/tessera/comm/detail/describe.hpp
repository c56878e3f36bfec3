/// Checks what a caller gave and puts it into a `call`: lengths, counts, roots, overlaps. Nothing is sent.
#ifndef TESSERA_COMM_DETAIL_DESCRIBE_HPP
#define TESSERA_COMM_DETAIL_DESCRIBE_HPP

#include <tessera/comm/detail/call.hpp>

namespace tessera::inline TESSERA_ABI::comm::detail {

/// The memory that a std::span or a device_span stands in.
template <class Span>
struct memory_of_span;
template <class S>
struct memory_of_span<std::span<S>> {
  using type = host_memory;
};
template <class S, memory_space Memory>
struct memory_of_span<device_span<S, Memory>> {
  using type = Memory;
};
template <class Span>
using memory_of = typename memory_of_span<Span>::type;

/// Inputs do not take part in deduction: spans of mutable elements and containers convert.
template <class Span>
using input_like = memory_span<typename Span::value_type const, memory_of<Span>>;
using counts_span = std::span<index_t const>;

/// A span of messages that can be lent to calls of `Engine`: to be read or, where not constant, written.
template <class Span, class Engine>
concept readable_by = requires {
  typename memory_of<Span>;
}
&&Engine::template reaches<memory_of<Span>>&& message_scalar<typename Span::value_type>;
template <class Span, class Engine>
concept message_of = readable_by<Span, Engine> && !std::is_const_v<typename Span::element_type>;
template <class Span, class Engine>
concept summand_of = message_of<Span, Engine> && reducible_scalar<typename Span::value_type>;

/// Describes calls of one rank. Every function throws size_error for what does not fit. Where the call stands
/// is left to who keeps it: a plain call passes that by, and it costs three words.
class describer {
public:
  describer(int my_rank, int ranks) noexcept : rank(my_rank), size(ranks) {}

  [[gnu::always_inline]] static call named(collective what) noexcept {
    call c;
    c.what = what;
    return c;
  }

  template <class Span>
  [[gnu::always_inline]] call broadcast(Span data, int root, site const& where) const {
    check_rank(root, "root", collective::broadcast, where);
    bool const gives = rank == root;
    auto c = describe(collective::broadcast, gives ? Span() : data, gives ? data : Span());
    c.count = static_cast<index_t>(data.size());
    c.root = root;
    return c;
  }
  [[gnu::always_inline]] static void reduce_with(call& c, reduce_options how) noexcept {
    c.operation = how.operation;
    c.order = how.order;
  }
  template <class Span>
  [[gnu::always_inline]] call reduce(Span out, input_like<Span> in, int root, reduce_options how,
                                     site const& where) const {
    check_rank(root, "root", collective::reduce, where);
    if (rank != root) out = {};
    auto c = describe(collective::reduce, out, in);
    if (rank == root) expect(c.out_items, c.in_items, "out", c.what, where);
    forbid_overlap(c, 0, where);
    c.count = c.in_items;
    c.root = root;
    reduce_with(c, how);
    return c;
  }
  template <class Span>
  [[gnu::always_inline]] call all_reduce(Span out, input_like<Span> in, reduce_options how,
                                         site const& where) const {
    auto c = describe(collective::all_reduce, out, in);
    expect(c.out_items, c.in_items, "out", c.what, where);
    forbid_overlap(c, 0, where);
    c.count = c.in_items;
    reduce_with(c, how);
    return c;
  }
  template <class Span>
  [[gnu::always_inline]] call reduce_scatter(Span out, input_like<Span> in, counts_span const* counts,
                                             reduce_options how, site const& where) const {
    auto c = describe(collective::reduce_scatter, out, in);
    if (counts != nullptr) {
      c.count = sum_of(*counts, "counts", c.what, where);
      c.in_counts = counts->data();
      expect(c.in_items, c.count, "in", c.what, where);
      expect(c.out_items, c.in_counts[rank], "out", c.what, where);
    } else {
      c.count = c.out_items;
      expect(c.in_items, times_size(c.out_items, "out", c.what, where), "in", c.what, where);
    }
    reduce_with(c, how);
    return c;
  }
  template <class Span>
  [[gnu::always_inline]] call gather(collective what, Span out, input_like<Span> in,
                                     counts_span const* counts, int root, site const& where) const {
    bool const receives = what == collective::all_gather || rank == root;
    if (what == collective::gather) check_rank(root, "root", what, where);
    if (!receives) out = {};
    auto c = describe(what, out, in);
    c.root = root;
    c.count = c.in_items;
    auto all = times_size(c.in_items, "in", what, where);
    if (counts != nullptr) {
      c.count = all = sum_of(*counts, "counts", what, where);
      c.in_counts = counts->data();
      expect(c.in_items, c.in_counts[rank], "in", what, where);
    }
    if (receives) expect(c.out_items, all, "out", what, where);
    forbid_overlap(c, my_offset(c), where);
    return c;
  }
  template <class Span>
  [[gnu::always_inline]] call scatter(Span out, input_like<Span> in, counts_span const* counts, int root,
                                      site const& where) const {
    constexpr auto what = collective::scatter;
    check_rank(root, "root", what, where);
    if (rank != root) in = {};
    auto c = describe(what, out, in);
    c.root = root;
    c.count = c.out_items;
    auto all = times_size(c.out_items, "out", what, where);
    if (counts != nullptr) {
      c.count = all = sum_of(*counts, "counts", what, where);
      c.in_counts = counts->data();
      expect(c.out_items, c.in_counts[rank], "out", what, where);
    }
    if (rank == root) expect(c.in_items, all, "in", what, where);
    forbid_overlap(c, -my_offset(c), where);
    return c;
  }
  template <class Span>
  [[gnu::always_inline]] call all_to_all(Span out, counts_span const* out_counts, input_like<Span> in,
                                         counts_span const* in_counts, site const& where) const {
    constexpr auto what = collective::all_to_all;
    auto c = describe(what, out, in);
    if (in_counts != nullptr) {
      expect(c.out_items, sum_of(*out_counts, "out_counts", what, where), "out", what, where);
      expect(c.in_items, sum_of(*in_counts, "in_counts", what, where), "in", what, where);
      c.in_counts = in_counts->data();
      c.out_counts = out_counts->data();
    } else {
      c.count = c.in_items / size;
      expect(c.in_items, c.count * size, "in", what, where);
      expect(c.out_items, c.in_items, "out", what, where);
    }
    if (auto const item = bytes_of(c.type); overlap(c.in, c.in_items * item, c.out, c.out_items * item))
      refuse_overlap(rank, c.what, where);
    return c;
  }
  template <class Span>
  [[gnu::always_inline]] call send(Span data, int to, int tag, site const& where) const {
    using out = memory_span<typename Span::value_type, memory_of<Span>>;
    return message(collective::send, out(), data, to, tag, where);
  }
  template <class Span>
  [[gnu::always_inline]] call receive(Span data, int from, int tag, site const& where) const {
    return message(collective::receive, data, Span(), from, tag, where);
  }

private:
  template <class Span>
  [[gnu::always_inline]] call message(collective what, Span out, input_like<Span> in, int peer, int tag,
                                      site const& where) const {
    check_rank(peer, what == collective::send ? "to" : "from", what, where);
    if (tag < 0 || tag > 32767)
      throw size_error("E-comm-006", where, name_of(what), ": `tag` is ", tag, " on rank ", rank,
                       ", need 0 to 32767");
    auto c = describe(what, out, in);
    c.count = c.in_items + c.out_items;
    c.root = peer;
    c.tag = tag;
    return c;
  }
  template <class Span>
  [[gnu::always_inline]] static call describe(collective what, Span out, input_like<Span> in) noexcept {
    auto c = named(what);
    c.type = element_of<typename Span::value_type>();
    c.on_device = !memory_of<Span>::host_accessible;
    c.in = in.data();
    c.out = out.data();
    c.in_items = static_cast<index_t>(in.size());
    c.out_items = static_cast<index_t>(out.size());
    return c;
  }
  // What throws stands apart and takes values, so that nothing is prepared for it, or in memory, before it is
  // needed.
  void expect(index_t items, index_t expected, char const* which, collective what, site const& where) const {
    if (items != expected) refuse_length(rank, size, items, expected, which, what, where);
  }
  void check_rank(int root, char const* which, collective what, site const& where) const {
    if (root < 0 || root >= size) refuse_rank(rank, size, root, which, what, where);
  }
  index_t sum_of(counts_span counts, char const* which, collective what, site const& where) const {
    expect(static_cast<index_t>(counts.size()), size, which, what, where);
    index_t sum = 0;
    for (auto each : counts)
      if (each < 0 || __builtin_add_overflow(sum, each, &sum))
        throw size_error("E-comm-003", where, name_of(what), ": `", which, "` on rank ", rank,
                         " has an impossible count, ", each);
    return sum;
  }
  index_t times_size(index_t items, char const* which, collective what, site const& where) const {
    index_t product = 0;
    if (__builtin_mul_overflow(items, index_t{size}, &product))
      refuse_product(size, items, which, what, where);
    return product;
  }
  [[gnu::always_inline]] index_t my_offset(call const& c) const noexcept {
    return offset_of(rank, c.count, c.in_counts);
  }
  /// `out` may begin `offset` elements before `in` does, and not overlap it otherwise.
  [[gnu::always_inline]] void forbid_overlap(call const& c, index_t offset, site const& where) const {
    auto const item = bytes_of(c.type);
    auto const distance = reinterpret_cast<std::intptr_t>(c.in) - reinterpret_cast<std::intptr_t>(c.out);
    if (distance != offset * item && overlap(c.in, c.in_items * item, c.out, c.out_items * item))
      refuse_overlap(rank, c.what, where);
  }
  [[noreturn, gnu::cold, gnu::noinline]] static void refuse_length(int rank, int size, index_t items,
                                                                   index_t expected, char const* which,
                                                                   collective what, site const& where) {
    throw size_error("E-comm-001", where, name_of(what), ": `", which, "` has ", items, " elements on rank ",
                     rank, " of ", size, ", need ", expected);
  }
  [[noreturn, gnu::cold, gnu::noinline]] static void
  refuse_product(int size, index_t items, char const* which, collective what, site const& where) {
    throw size_error("E-comm-003", where, name_of(what), ": `", which, "` of ", items, " elements on ", size,
                     " ranks is more than 2^63 - 1 elements");
  }
  [[noreturn, gnu::cold, gnu::noinline]] static void
  refuse_rank(int rank, int size, int root, char const* which, collective what, site const& where) {
    throw size_error("E-comm-002", where, name_of(what), ": `", which, "` is ", root, " on rank ", rank,
                     ", need 0 to ", size - 1);
  }
  [[noreturn, gnu::cold, gnu::noinline]] static void refuse_overlap(int rank, collective what,
                                                                    site const& where) {
    throw size_error("E-comm-005", where, name_of(what), ": `in` and `out` overlap on rank ", rank,
                     " in a way that this call does not allow");
  }

  int rank, size;
};

} // namespace tessera::inline TESSERA_ABI::comm::detail

#endif
