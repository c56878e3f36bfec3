/// Drives the operations of one communicator.
///
/// A call is one step or several (signatures, then data; exchange, then collect). The first step goes out at
/// once, in program order, which is the same on all ranks. Later steps go out when those of all earlier calls
/// have: again one order on all ranks, whichever request is waited for first.
#ifndef TESSERA_COMM_DETAIL_ENGINE_HPP
#define TESSERA_COMM_DETAIL_ENGINE_HPP

#include <tessera/comm/detail/agreement.hpp>
#include <tessera/comm/detail/operation.hpp>

namespace tessera::inline TESSERA_ABI::comm::detail {

template <transport T>
class alignas(64) engine {
public:
  using op = operation<T>;
  using stage = typename op::stage;
  using bulk_memory = host_memory;
  /// Memory whose spans it takes: the host's, and a device's where the transport can tell what to do with it.
  template <memory_space Memory>
  static constexpr bool reaches = Memory::host_accessible || device_transport<T>;
  /// Whether plain calls go to the transport as they are.
  static constexpr bool direct = direct_transport<T>;
  template <reducible_scalar S>
  static constexpr combine_function combiner() noexcept {
    return &detail::combine<S>;
  }

  engine(T&& moved, communicator_options options, std::uint64_t group)
      : transport(static_cast<T&&>(moved)),
        signs_(T::checks_signatures || options.checked || options.stall_limit > 0),
        guarded_(options.checked || options.stall_limit > 0), options(options), group(group) {}
  engine(engine const&) = delete;
  engine& operator=(engine const&) = delete;
  ~engine() {
    for (auto* spare = spare_; spare != nullptr;) {
      auto* const next = spare->next;
      delete spare;
      spare = next;
    }
  }

  // What a plain call reads and writes stands together: the library below leaves little of the first cache.
  T transport;
  std::int64_t sequence = 0;

private:
  bool const signs_, guarded_;
  bool lost_ = false;
  op* first_ = nullptr;
  op* last_ = nullptr;
  op* spare_ = nullptr;

public:
  traffic_meter meter{transport.size()};
  memory_meter memory;
  communicator_options const options;
  std::uint64_t const group;

  int rank() const noexcept { return transport.rank(); }
  int size() const noexcept { return transport.size(); }
  /// The engine of the group of `members`, which have one color.
  engine* split(std::vector<int> const& members, int color, int key, std::uint64_t id, site where) {
    return new engine(transport.split(members, color, key, id, options, where), options, id);
  }

  /// Whether a call of one step may go straight to the transport.
  bool plain() const noexcept { return !(guarded_ | lost_ | (first_ != nullptr)); }
  [[gnu::always_inline]] void run(call const& c, site const& where) requires direct_transport<T> {
    if (!c.is_point_to_point()) ++sequence;
    transport.run(transfer_of(c), where);
  }
  op& begin(call const& c, bool blocking) {
    if (lost_)
      throw peer_failed("E-comm-016", c.where, name_of(c.what),
                        " on a communicator that an earlier failure or an abandoned request made useless");
    if constexpr (device_transport<T>)
      if (c.on_device) transport.admit(c, needs_staging(c) || (options.checked && !blocking));
    if (first_ != nullptr) progress();
    if constexpr (direct_transport<T>)
      if (blocking && !guarded_ && !c.is_point_to_point()) drain();
    auto& fresh = take(c, blocking);
    try {
      first_step(fresh);
    } catch (...) {
      end_with_error(fresh);
    }
    if (!fresh.finished) {
      (last_ == nullptr ? first_ : last_->next) = &fresh;
      last_ = &fresh;
      if (!fresh.in_transit) progress();
    }
    return fresh;
  }

  /// Drives everything as far as it goes now. True if anything moved.
  bool progress() {
    bool moved = false, clear = true; // all earlier operations are settled
    for (auto* each = first_; each != nullptr; each = each->next) {
      try {
        moved |= drive(*each, clear);
      } catch (...) {
        end_with_error(*each);
        moved = true;
      }
      clear = clear && each->settled;
    }
    if (moved) unlink_finished();
    return moved;
  }

  /// Whether it has ended.
  bool advance(op& one) {
    progress();
    return one.finished;
  }

  /// Waits for the end, frees the operation, and throws what it ended with.
  void complete(op& one) {
    if constexpr (direct_transport<T>)
      while (!guarded_ && first_ == &one && last_ == &one) {
        if (one.in_transit) {
          try {
            transport.wait(one.ticket);
            one.in_transit = false;
          } catch (...) {
            end_with_error(one);
            unlink_finished();
            break;
          }
        }
        progress();
      }
    if (!one.finished) {
      typename T::patience patience(transport);
      while (!one.finished)
        if (!progress()) {
          try {
            transport.pause(patience, one.sign, one.request.where);
          } catch (...) {
            end_with_error(one);
            lose();
            unlink_finished();
          }
        }
    }
    free(one);
  }

  /// Frees a finished operation, and throws what it ended with.
  void free(op& one) {
    if (!one.error && one.lent.any()) {
      try {
        one.lent.give_back(host_store(), one.sign, one.staged.data(), one.request.where);
      } catch (...) {
        one.error = std::current_exception();
      }
    }
    auto const error = static_cast<std::exception_ptr&&>(one.error);
    one.error = nullptr;
    if (!one.in_transit) {
      one.next = spare_;
      spare_ = &one;
    } // otherwise a transfer may still write to its memory, which is therefore never given back
    if (error) std::rethrow_exception(error);
  }

  /// Gives an operation up: its peers cannot finish, nor can this communicator go on.
  void abandon(op& one) noexcept {
    lose();
    one.lent = {};
    one.error = nullptr;
    give_up(one);
    unlink_finished();
    free(one);
  }
  void lose() noexcept { lost_ = true; }
  /// Takes a receive back: nobody waits for it.
  void withdraw(op& one) noexcept {
    one.lent = {};
    one.error = nullptr;
    one.finished = one.settled = true;
    if (one.in_transit) one.in_transit = !transport.withdraw(one.ticket);
    unlink_finished();
    free(one);
  }

private:
  memory_account account() noexcept { return {&memory, memory_kind::communication}; }
  rank_order_steps steps_of(op const& one) const noexcept { return {one.request, rank(), size()}; }

  /// Ends all collectives in flight. A blocking collective of the library goes on as one on all ranks (it
  /// would not meet a non-blocking one), and while it blocks, none of those could advance.
  void drain() {
    typename T::patience patience(transport);
    for (auto* each = first_; each != nullptr;)
      if (each->request.is_point_to_point()) {
        each = each->next;
      } else {
        if (!progress()) transport.pause(patience, each->sign, each->request.where);
        each = first_;
      }
  }
  op& take(call const& c, bool blocking) {
    auto* fresh = spare_;
    if (fresh == nullptr)
      fresh = new op();
    else
      spare_ = fresh->next;
    fresh->reset(c, blocking);
    return *fresh;
  }
  void end_with_error(op& one) noexcept {
    one.error = std::current_exception();
    give_up(one);
  }
  void give_up(op& one) noexcept {
    one.finished = one.settled = true;
    if (one.in_transit) one.in_transit = !transport.abandon(one.ticket);
  }
  void unlink_finished() noexcept {
    last_ = nullptr;
    for (auto** link = &first_; *link != nullptr;) {
      if ((*link)->finished) {
        *link = (*link)->next;
      } else {
        last_ = *link;
        link = &(*link)->next;
      }
    }
  }

  table_layout tables_of(op const& one) const noexcept {
    return {size(), options.checked && !T::checks_signatures, one.request.has_own_counts()};
  }
  index_t* table(op& one, index_t at) const noexcept { return static_cast<index_t*>(one.tables.data()) + at; }
  signature* signatures(op& one) const noexcept {
    return reinterpret_cast<signature*>(table(one, tables_of(one).signatures()));
  }

  void first_step(op& one) {
    auto& c = one.request;
    if (!c.is_point_to_point()) ++sequence;
    if (signs_) one.sign = signature_of(c, size(), c.is_point_to_point() ? 0 : sequence, group, one.blocking);
    auto const tables = tables_of(one);
    room(one.tables, tables.bytes(), account(), c.where);
    if (c.in_counts != nullptr) { // the caller may forget them
      copy(table(one, tables.given()), c.in_counts, size() * 8);
      c.in_counts = table(one, tables.given());
      if (c.out_counts != nullptr) {
        copy(table(one, tables.given() + size()), c.out_counts, size() * 8);
        c.out_counts = table(one, tables.given() + size());
      }
    }
    if (options.checked && !one.blocking) one.lent.lend(host_store(), one.request, one.staged, account());
    if (tables.checked && !c.is_point_to_point() && size() > 1) {
      one.at = stage::signatures;
      auto* all = signatures(one);
      all[rank()] = one.sign;
      gather_bytes(one, all, static_cast<index_t>(sizeof(signature)));
    } else {
      data_step(one);
    }
  }

  bool drive(op& one, bool clear) {
    bool moved = false;
    while (!one.finished) {
      if (one.in_transit) {
        if (!transport.test(one.ticket)) return moved;
        one.in_transit = false;
        moved = true;
      }
      if (!one.settled) {
        if (!clear) return moved;
        next_step(one);
        moved = true;
      } else {
        if (one.delivers)
          copy(one.request.out, one.staged.data(), one.request.out_items * bytes_of(one.request.type));
        one.finished = moved = true;
      }
    }
    return moved;
  }

  void issue(op& one, transfer step, bool last) {
    step.step = one.steps++;
    step.sign = signs_ ? &one.sign : nullptr;
    step.where = one.request.where;
    one.settled = last;
    if constexpr (direct_transport<T>)
      if (one.blocking && !guarded_ && (first_ == nullptr || !one.request.is_point_to_point()))
        return transport.run(step, step.where);
    one.in_transit = false; // until it has begun
    transport.start(step, one.ticket);
    one.in_transit = true;
  }
  /// Every rank's `bytes`, in place in `all`.
  void gather_bytes(op& one, void* all, index_t bytes) {
    transfer step;
    step.what = collective::all_gather;
    step.in = at(all, bytes * rank());
    step.out = all;
    step.count = bytes;
    issue(one, step, false);
  }

  void next_step(op& one) {
    switch (one.at) {
    case stage::signatures:
      compare_signatures(signatures(one), size(), rank(), one.request.where);
      if (!one.request.has_own_counts()) return data_step(one);
      return counts_step(one);
    case stage::counts:
      compare_counts(table(one, tables_of(one).all_counts()), size(), one.sign, one.request.where);
      return data_step(one);
    case stage::data:
      return add_up(one);
    case stage::flags: {
      auto const* flags = reinterpret_cast<std::byte const*>(table(one, tables_of(one).flags()));
      for (int r = 0; r < size(); ++r)
        if (flags[r] != std::byte{0}) throw_overflow(one);
      return after_sum(one);
    }
    case stage::collect:
      return;
    }
  }

  void counts_step(op& one) {
    one.at = stage::counts;
    auto const bytes = 2 * size() * static_cast<index_t>(sizeof(index_t));
    auto* all = table(one, tables_of(one).all_counts());
    copy(at(all, bytes * rank()), one.request.in_counts, bytes);
    gather_bytes(one, all, bytes);
  }
  void data_step(op& one) {
    one.at = stage::data;
    auto const& c = one.request;
    auto step = transfer_of(c);
    if (!one.in_fixed_order()) {
      if (needs_staging(c)) { // a native reduction into its own input
        step.out = room(one.staged, c.out_items * bytes_of(c.type), account(), c.where);
        one.delivers = true;
      }
      return issue(one, step, true);
    }
    if (size() == 1) {
      copy(c.out, c.in, c.in_items * bytes_of(c.type));
      one.settled = true;
      return;
    }
    auto const steps = steps_of(one);
    auto* pieces = room(one.pieces, steps.pieces_bytes(), account(), c.where);
    auto const tables = tables_of(one);
    issue(one, steps.exchange(pieces, table(one, tables.sends()), table(one, tables.receives())), false);
  }

  void add_up(op& one) {
    auto const& c = one.request;
    bool const exact = c.combine(nullptr, steps_of(one).sum(one.pieces.data()));
    if (steps_of(one).whole()) { // every rank has seen everything, and agrees on an overflow
      if (!exact) throw_overflow(one);
      after_sum(one);
    } else if (is_integer(c.type) && c.operation == reduction::sum) {
      one.at = stage::flags;
      auto* flags = reinterpret_cast<std::byte*>(table(one, tables_of(one).flags()));
      flags[rank()] = std::byte{!exact};
      gather_bytes(one, flags, 1);
    } else {
      after_sum(one);
    }
  }

  void after_sum(op& one) {
    one.at = stage::collect;
    one.settled = true;
    if (steps_of(one).collects())
      issue(one, steps_of(one).collect(one.pieces.data(), table(one, tables_of(one).sends())), true);
  }

  [[noreturn]] void throw_overflow(op& one) const {
    throw numeric_error("E-comm-012", one.request.where, name_of(one.request.what),
                        ": a sum over ranks does not fit ", name_of(one.request.type),
                        "; reduce in a wider type");
  }
};

} // namespace tessera::inline TESSERA_ABI::comm::detail

#endif
