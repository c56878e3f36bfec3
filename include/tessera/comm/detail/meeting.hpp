/// Where thread ranks meet: each collective is a round at which all ranks of a group arrive; the last one to
/// arrive copies for all. Waiting ranks sleep on a condition variable and are woken by completion, failure, a
/// mismatch or the watchdog.
#ifndef TESSERA_COMM_DETAIL_MEETING_HPP
#define TESSERA_COMM_DETAIL_MEETING_HPP

#include <chrono>
#include <condition_variable>
#include <memory>
#include <mutex>

#include <tessera/comm/detail/mailbox.hpp>

namespace tessera::inline TESSERA_ABI::comm::detail {

/// One collective (or one step of it) of a group, found by its number.
struct round {
  std::int64_t sequence = 0;
  int step = 0;
  int arrived = 0, left = 0;
  bool active = false, running = false, done = false;
  std::vector<transfer> transfers;
  std::vector<signature> signs;
  std::vector<char> here;

  void open(int ranks, std::int64_t at_sequence, int at_step) {
    auto const n = static_cast<std::size_t>(ranks);
    sequence = at_sequence;
    step = at_step;
    arrived = left = 0;
    active = true;
    running = done = false;
    transfers.resize(n);
    signs.resize(n);
    here.assign(n, 0);
  }
};

/// Carries out a round in which all have arrived. Signatures agree, so do the counts that they digest.
inline void perform(std::vector<transfer> const& all) noexcept {
  auto const ranks = narrow<int>(all.size());
  auto const& any = all.front();
  auto const item = bytes_of(any.type);
  // Part `part` of a buffer laid out by `counts`, or by equal counts.
  auto const offset = [&](int part, index_t const* counts) {
    return offset_of(part, any.count, counts) * item;
  };
  auto const length = [&](int part, index_t const* counts) {
    return (counts != nullptr ? counts[part] : any.count) * item;
  };
  auto const of = [&](int rank) -> transfer const& { return all[static_cast<std::size_t>(rank)]; };
  auto const gather_at = [&](int to) {
    auto const* counts = of(to).out_counts;
    for (int from = 0; from < ranks; ++from)
      copy(at(of(to).out, offset(from, counts)), of(from).in, length(from, counts));
  };
  for (int r = 0; r < ranks; ++r) {
    auto const& mine = of(r);
    switch (any.what) {
    case collective::broadcast:
      if (r != any.root) copy(mine.out, of(any.root).in, any.count * item);
      break;
    case collective::all_gather:
      gather_at(r);
      break;
    case collective::gather:
      if (r == any.root) gather_at(r);
      break;
    case collective::scatter:
      copy(mine.out, at(of(any.root).in, offset(r, mine.in_counts)), length(r, mine.in_counts));
      break;
    case collective::all_to_all:
      for (int from = 0; from < ranks; ++from)
        copy(at(mine.out, offset(from, mine.out_counts)), at(of(from).in, offset(r, of(from).in_counts)),
             length(from, mine.out_counts));
      break;
    default: // a barrier moves nothing
      break;
    }
  }
}

struct group;

/// What all rank threads of one run share. One mutex guards everything that is shared.
struct world {
  /// What a rank sleeps for: that its group's epoch moves on.
  struct sleeper {
    group const* at = nullptr; // null: it does not sleep
    std::uint64_t epoch = 0;
    signature const* sign = nullptr;
  };

  explicit world(int ranks)
      : gone(static_cast<std::size_t>(ranks), 0), asleep(static_cast<std::size_t>(ranks)) {}

  std::mutex mutex;
  std::vector<char> gone;      // ranks whose function has ended
  std::vector<sleeper> asleep; // by rank
  std::string failure;         // of the first rank that failed; empty: none
  std::vector<std::weak_ptr<group>> groups;
  std::vector<std::shared_ptr<group>>
      forming; // not yet joined by all members: what befalls it is for them too

  std::shared_ptr<group> group_of(std::uint64_t id, std::vector<int> const& members);
  /// Rank `rank` has ended, by an exception if `why` is not empty: nobody need wait for it.
  void leave(int rank, std::string const& why);
  /// Ends all groups if every rank sleeps and nothing has happened that wakes one: then nothing ever will.
  /// Called with the mutex held.
  void end_if_stuck();
};

/// Ranks that communicate, numbered anew from 0.
struct group {
  enum class fate : std::uint8_t { fine, mismatch, stalled, given_up };

  group(world& shared, std::uint64_t number, std::vector<int> const& world_ranks)
      : owner(shared), id(number), members(world_ranks), last(world_ranks.size()) {}

  world& owner;
  std::uint64_t const id;
  std::vector<int> const members;
  std::condition_variable changed;
  std::uint64_t epoch = 0;
  int joined = 0;
  fate state = fate::fine;
  std::string why;
  std::vector<std::unique_ptr<round>> rounds;
  std::vector<signature> last; // where each rank was seen last
  mailbox mail;

  int size() const noexcept { return narrow<int>(members.size()); }
  bool gone(int rank) const noexcept {
    return owner.gone[static_cast<std::size_t>(members[static_cast<std::size_t>(rank)])] != 0;
  }

  // All below: called with the mutex held.

  void wake() {
    ++epoch;
    changed.notify_all();
  }
  void end(fate how, std::string text) {
    if (state != fate::fine) return;
    state = how;
    why = static_cast<std::string&&>(text);
    wake();
  }
  /// Throws if the group, or a rank anywhere in the world, has come to an end.
  void check(signature const& sign, site where) const {
    switch (state) {
    case fate::mismatch:
      throw collective_mismatch("E-comm-010", where, why);
    case fate::stalled:
      throw stalled("E-comm-021", where, why);
    case fate::given_up:
      throw peer_failed("E-comm-017", where, text_of(sign), " cannot finish: ",
                        owner.failure.empty() ? why : owner.failure); // what began it, where that is known
    case fate::fine:
      break;
    }
    if (!owner.failure.empty())
      throw peer_failed("E-comm-017", where, text_of(sign), " cannot finish: ", owner.failure);
  }

  round& round_of(std::int64_t sequence, int step) {
    round* idle = nullptr;
    for (auto& each : rounds) {
      if (each->active && each->sequence == sequence && each->step == step) return *each;
      if (!each->active) idle = each.get();
    }
    if (idle == nullptr) idle = rounds.emplace_back(std::make_unique<round>()).get();
    idle->open(size(), sequence, step);
    return *idle;
  }

  /// Ranks that `r` waits for and that have ended without it: it will never be complete.
  void check_gone(round const& r, signature const& sign) {
    for (int rank = 0; rank < size(); ++rank)
      if (r.here[static_cast<std::size_t>(rank)] == 0 && gone(rank))
        end(fate::mismatch, tessera::text_of("ranks called different collectives: others are in ",
                                             text_of(sign), ", rank ", rank, " has ended", seen(rank)));
  }
  std::string seen(int rank) const {
    auto const& sign = last[static_cast<std::size_t>(rank)];
    return sign.sequence == 0 ? std::string(" (no collective so far)")
                              : tessera::text_of(" (its last: ", text_of(sign), ")");
  }
  /// "rank 2 (its last: barrier at ...), rank 3 ...": whom a call waits for.
  std::string missing(signature const& sign) const {
    if (sign.what == collective::send || sign.what == collective::receive)
      return tessera::text_of("rank ", sign.root);
    for (auto const& each : rounds) {
      if (!each->active || each->done || each->sequence != sign.sequence) continue;
      std::string names;
      for (int rank = 0; rank < size(); ++rank)
        if (each->here[static_cast<std::size_t>(rank)] == 0)
          names += tessera::text_of(names.empty() ? "rank " : ", rank ", rank, seen(rank));
      if (!names.empty()) return names;
    }
    return "an earlier request";
  }
};

inline std::shared_ptr<group> world::group_of(std::uint64_t id, std::vector<int> const& members) {
  std::lock_guard lock(mutex);
  std::shared_ptr<group> found;
  std::size_t kept = 0;
  for (auto& known : groups)
    if (auto held = known.lock()) {
      if (held->id == id) found = held;
      groups[kept++] = held;
    }
  groups.resize(kept);
  if (!found) {
    found = std::make_shared<group>(*this, id, members);
    groups.push_back(found);
    forming.push_back(found);
  }
  if (++found->joined == found->size())
    for (auto& each : forming)
      if (each == found) {
        each.swap(forming.back());
        forming.pop_back();
        break;
      }
  return found;
}

inline void world::leave(int rank, std::string const& why) {
  std::lock_guard lock(mutex);
  gone[static_cast<std::size_t>(rank)] = 1;
  if (failure.empty() && !why.empty()) failure = tessera::text_of("rank ", rank, " failed: ", why);
  for (auto& known : groups)
    if (auto held = known.lock()) held->wake();
}

inline void world::end_if_stuck() {
  for (std::size_t rank = 0; rank < asleep.size(); ++rank)
    if (gone[rank] == 0 && (asleep[rank].at == nullptr || asleep[rank].at->epoch != asleep[rank].epoch))
      return;
  std::string all;
  for (std::size_t rank = 0; rank < asleep.size(); ++rank)
    if (gone[rank] == 0)
      all += tessera::text_of(all.empty() ? "" : ", ", "rank ", rank, " ", text_of(*asleep[rank].sign),
                              " (group ", asleep[rank].at->id, ")");
  for (auto& known : groups)
    if (auto held = known.lock())
      held->end(group::fate::mismatch,
                "ranks called different collectives, or on different communicators, and all of them wait: " +
                    all);
}

} // namespace tessera::inline TESSERA_ABI::comm::detail

#endif
