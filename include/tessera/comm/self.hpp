/// One rank: every collective is a copy, every reduction the identity. Code written for a communicator runs
/// on it without a library, a thread or a cost.
///
///     comm::self alone;
///     alone.all_reduce(values);          // unchanged
#ifndef TESSERA_COMM_SELF_HPP
#define TESSERA_COMM_SELF_HPP

#include <tessera/comm/detail/interface.hpp>
#include <tessera/comm/detail/mailbox.hpp>

namespace tessera::inline TESSERA_ABI::comm {

namespace detail {

/// Collectives end where they start; a message to oneself meets its other side among the requests in flight.
class self_transport {
public:
  static constexpr bool checks_signatures = true; // there is nobody to differ from
  static constexpr bool reduces = false;

  struct ticket {
    mailbox::letter letter;
  };
  struct patience {
    explicit patience(self_transport&) noexcept {}
  };

  int rank() const noexcept { return 0; }
  int size() const noexcept { return 1; }

  void start(transfer const& step, ticket& t) {
    t.letter = {0, 0, step, {}, mailbox::state::done};
    if (step.what == collective::send || step.what == collective::receive)
      mail_.post(t.letter);
    else if (step.what != collective::broadcast) // the root has its data
      copy(step.out, step.in,
           (step.in_counts != nullptr ? *step.in_counts : step.count) * bytes_of(step.type));
  }
  bool test(ticket& t) {
    if (t.letter.at == mailbox::state::unequal) throw_unequal(t.letter);
    return t.letter.at == mailbox::state::done;
  }
  void pause(patience&, signature const& sign, site where) {
    throw stalled("E-comm-020", where, text_of(sign),
                  " would wait for ever: on a communicator of one rank the ",
                  "other side of a message must have been started before");
  }
  bool withdraw(ticket& t) noexcept {
    mail_.withdraw(t.letter);
    return true;
  }
  bool abandon(ticket& t) noexcept { return withdraw(t); }

  self_transport split(std::vector<int> const&, int, int, std::uint64_t, communicator_options, site) {
    return {};
  }

private:
  mailbox mail_;
};

} // namespace detail

class self : public detail::interface<self, detail::engine<detail::self_transport>> {
  using base = detail::interface<self, detail::engine<detail::self_transport>>;

public:
  explicit self(communicator_options options = {})
      : base(new detail::engine<detail::self_transport>({}, options, 1)) {}

private:
  friend base;
  explicit self(detail::engine<detail::self_transport>* owned) noexcept : base(owned) {}
};

static_assert(communicator<self>);

} // namespace tessera::inline TESSERA_ABI::comm

#endif
