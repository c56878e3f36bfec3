/// Matches sends with receives among ranks of one process: by sender, receiver and tag, in order.
#ifndef TESSERA_COMM_DETAIL_MAILBOX_HPP
#define TESSERA_COMM_DETAIL_MAILBOX_HPP

#include <vector>

#include <tessera/comm/detail/call.hpp>

namespace tessera::inline TESSERA_ABI::comm::detail {

class mailbox {
public:
  enum class state : std::uint8_t { none, posted, done, unequal };

  /// One side of a message, owned by its ticket. Its address is what the mailbox knows: it stays in place
  /// while it is posted.
  struct letter {
    int from = 0, to = 0;
    transfer what;
    signature other; // filled in where the two sides do not fit
    state at = state::none;

    bool sends() const noexcept { return what.what == collective::send; }
  };

  /// Delivers at once if the other side is waiting; true then, and the other side has ended too.
  bool post(letter& mine) {
    for (auto place = waiting_.begin(); place != waiting_.end(); ++place) {
      auto& other = **place;
      if (other.from != mine.from || other.to != mine.to || other.what.tag != mine.what.tag ||
          other.sends() == mine.sends())
        continue;
      waiting_.erase(place);
      if (mine.what.type == other.what.type && mine.what.count == other.what.count) {
        auto const& source = mine.sends() ? mine.what : other.what;
        auto const& target = mine.sends() ? other.what : mine.what;
        copy(target.out, source.in, source.count * bytes_of(source.type));
        mine.at = other.at = state::done;
      } else {
        mine.other = *other.what.sign;
        other.other = *mine.what.sign;
        mine.at = other.at = state::unequal;
      }
      return true;
    }
    mine.at = state::posted;
    waiting_.push_back(&mine);
    return false;
  }

  void withdraw(letter& mine) noexcept {
    for (auto place = waiting_.begin(); place != waiting_.end(); ++place)
      if (*place == &mine) {
        waiting_.erase(place);
        break;
      }
    mine.at = state::none;
  }

private:
  std::vector<letter*> waiting_;
};

/// What a receive or send ends with when the two sides differ.
[[noreturn]] inline void throw_unequal(mailbox::letter const& mine) {
  throw collective_mismatch("E-comm-013", mine.what.where,
                            "the two sides of a message differ: ", text_of(*mine.what.sign), " meets ",
                            text_of(mine.other));
}

} // namespace tessera::inline TESSERA_ABI::comm::detail

#endif
