/// Ranks that are threads of one process: for tests, for a laptop, for eight ranks on two cores. They sleep
/// while they wait. Every collective's signature is compared; a rank that throws wakes all others with
/// peer_failed. Ranks that all wait for each other, as in two communicators, are told so: none hangs.
///
///     comm::run_threads(4, [](comm::threads& ranks) {
///       std::vector<float> mine(8, 1.0f);
///       ranks.all_reduce(std::span(mine));          // 4.0f everywhere
///     });
///
/// Cost: each message is copied once, by the last rank to arrive; one wake-up a rank and step.
#ifndef TESSERA_COMM_THREADS_HPP
#define TESSERA_COMM_THREADS_HPP

#include <thread>

#include <tessera/comm/detail/interface.hpp>
#include <tessera/comm/detail/meeting.hpp>

namespace tessera::inline TESSERA_ABI::comm {

namespace detail {

class threads_transport {
public:
  static constexpr bool checks_signatures = true;
  static constexpr bool reduces = false;

  struct ticket {
    round* where = nullptr;
    mailbox::letter letter;
  };
  struct patience {
    explicit patience(threads_transport& t) : start(std::chrono::steady_clock::now()) {
      std::lock_guard lock(t.group_->owner.mutex);
      epoch = t.group_->epoch;
    }
    std::uint64_t epoch = 0;
    std::chrono::steady_clock::time_point start;
  };

  threads_transport(std::shared_ptr<group> meeting, int rank, double stall_limit)
      : group_(static_cast<std::shared_ptr<group>&&>(meeting)), rank_(rank), stall_limit_(stall_limit) {}

  int rank() const noexcept { return rank_; }
  int size() const noexcept { return group_->size(); }

  void start(transfer const& step, ticket& t) {
    std::unique_lock lock(group_->owner.mutex);
    auto const& sign = *step.sign;
    group_->check(sign, step.where);
    if (step.what == collective::send || step.what == collective::receive) {
      t.where = nullptr;
      bool const sends = step.what == collective::send;
      t.letter = {sends ? rank_ : step.root, sends ? step.root : rank_, step, {}, mailbox::state::none};
      if (group_->mail.post(t.letter)) group_->wake();
      return;
    }
    auto const self = static_cast<std::size_t>(rank_);
    group_->last[self] = sign;
    auto& meeting = group_->round_of(sign.sequence, step.step);
    for (std::size_t r = 0; r < meeting.here.size(); ++r)
      if (meeting.here[r] != 0 && !agree(meeting.signs[r], sign)) {
        group_->end(group::fate::mismatch,
                    tessera::text_of("ranks called different collectives: rank ", r, " ",
                                     text_of(meeting.signs[r]), ", rank ", rank_, " ", text_of(sign)));
        group_->check(sign, step.where);
      }
    meeting.here[self] = 1;
    meeting.transfers[self] = step;
    meeting.signs[self] = sign;
    t.where = &meeting;
    if (++meeting.arrived < size()) return;
    compare_counts(meeting, step);
    meeting.running = true; // from here on nobody leaves before it is done
    lock.unlock();
    perform(meeting.transfers);
    lock.lock();
    meeting.running = false;
    meeting.done = true;
    group_->wake();
  }

  bool test(ticket& t) {
    std::lock_guard lock(group_->owner.mutex);
    if (t.where == nullptr) return test_letter(t.letter);
    auto& meeting = *t.where;
    if (meeting.done) {
      leave(meeting);
      return true;
    }
    if (meeting.running) return false;
    auto const& mine = static_cast<std::size_t>(rank_);
    group_->check(meeting.signs[mine], meeting.transfers[mine].where);
    group_->check_gone(meeting, meeting.signs[mine]);
    group_->check(meeting.signs[mine], meeting.transfers[mine].where);
    return false;
  }

  void pause(patience& p, signature const& sign, site where) {
    std::unique_lock lock(group_->owner.mutex);
    auto const moved = [&] { return group_->epoch != p.epoch; };
    if (stall_limit_ <= 0) {
      auto& world = group_->owner;
      auto& self = world.asleep[static_cast<std::size_t>(group_->members[static_cast<std::size_t>(rank_)])];
      self = {group_.get(), p.epoch, &sign};
      world.end_if_stuck();
      group_->changed.wait(lock, moved);
      self = {};
    } else if (!group_->changed.wait_until(lock, p.start + std::chrono::duration<double>(stall_limit_),
                                           moved)) {
      group_->end(group::fate::stalled,
                  tessera::text_of("after ", stall_limit_, " s rank ", rank_, " of ", size(), " gave up ",
                                   text_of(sign), "; it waited for ", group_->missing(sign)));
      group_->check(sign, where);
    }
    p.epoch = group_->epoch;
  }

  bool abandon(ticket& t) noexcept {
    std::unique_lock lock(group_->owner.mutex);
    if (t.where == nullptr) {
      group_->mail.withdraw(t.letter);
    } else {
      group_->changed.wait(lock, [&] { return !t.where->running; });
      if (t.where->done) {
        leave(*t.where);
        return true;
      }
    }
    group_->end(group::fate::given_up,
                tessera::text_of("rank ", rank_, " gave up a request that had not ended"));
    return true;
  }

  bool withdraw(ticket& t) noexcept {
    std::lock_guard lock(group_->owner.mutex);
    group_->mail.withdraw(t.letter);
    return true;
  }

  threads_transport split(std::vector<int> const& members, int, int, std::uint64_t id, communicator_options,
                          site) {
    std::vector<int> world_ranks;
    int rank = 0;
    for (int member : members) {
      if (member == rank_) rank = narrow<int>(world_ranks.size());
      world_ranks.push_back(group_->members[static_cast<std::size_t>(member)]);
    }
    return {group_->owner.group_of(id, world_ranks), rank, stall_limit_};
  }

private:
  void leave(round& meeting) noexcept {
    if (++meeting.left == size()) meeting.active = false;
  }

  bool test_letter(mailbox::letter& letter) {
    if (letter.at == mailbox::state::done) return true;
    if (letter.at == mailbox::state::unequal) throw_unequal(letter);
    auto const peer = letter.sends() ? letter.to : letter.from;
    try {
      group_->check(*letter.what.sign, letter.what.where);
      if (group_->gone(peer))
        group_->end(group::fate::mismatch, tessera::text_of(text_of(*letter.what.sign), " on rank ", rank_,
                                                            " waits for rank ", peer, ", which has ended"));
      group_->check(*letter.what.sign, letter.what.where);
    } catch (...) {
      group_->mail.withdraw(letter);
      throw;
    }
    return false;
  }

  /// all_to_all_v: what each rank sends is what its peer expects.
  void compare_counts(round& meeting, transfer const& step) {
    if (step.what != collective::all_to_all || step.in_counts == nullptr) return;
    for (int from = 0; from < size(); ++from)
      for (int to = 0; to < size(); ++to) {
        auto const sent = meeting.transfers[static_cast<std::size_t>(from)].in_counts[to];
        auto const expected = meeting.transfers[static_cast<std::size_t>(to)].out_counts[from];
        if (sent == expected) continue;
        group_->end(group::fate::mismatch,
                    tessera::text_of(text_of(*step.sign), ": rank ", from, " sends ", sent,
                                     " elements to rank ", to, ", which expects ", expected));
        group_->check(*step.sign, step.where);
      }
  }

  std::shared_ptr<group> group_;
  int rank_;
  double stall_limit_;
};

} // namespace detail

/// One rank of `run_threads`, used by the thread that it was given to.
class threads : public detail::interface<threads, detail::engine<detail::threads_transport>> {
  using base = detail::interface<threads, detail::engine<detail::threads_transport>>;
  using engine = detail::engine<detail::threads_transport>;

public:
  /// What run_threads gives to rank `rank` of `shared`.
  threads(detail::world& shared, int rank, communicator_options options)
      : base(new engine({shared.group_of(1, everyone(shared)), rank, options.stall_limit}, options, 1)) {}

private:
  friend base;
  explicit threads(engine* owned) noexcept : base(owned) {}

  static std::vector<int> everyone(detail::world const& shared) {
    std::vector<int> members;
    for (std::size_t r = 0; r < shared.gone.size(); ++r) members.push_back(narrow<int>(r));
    return members;
  }
};

static_assert(communicator<threads>);

/// Calls body(rank) on `ranks` threads, each with its own communicator, and returns when all have ended.
/// Rethrows the first exception that was not the consequence of another rank's.
template <std::invocable<threads&> F>
void run_threads(int ranks, F&& body, communicator_options options = {}, site where = site::here()) {
  if (ranks < 1)
    throw config_error("E-comm-007", where, "run_threads: ", ranks, " ranks were asked for, need 1 or more");
  detail::world shared(ranks);
  std::exception_ptr cause, consequence;
  auto const run = [&](int rank) {
    std::string why;
    auto const fail = [&](std::exception_ptr& slot, char const* text) {
      why = text;
      std::lock_guard lock(shared.mutex);
      if (!slot) slot = std::current_exception();
    };
    try {
      threads mine(shared, rank, options);
      body(mine);
    } catch (peer_failed const& e) {
      fail(consequence, e.what());
    } catch (std::exception const& e) {
      fail(cause, e.what());
    } catch (...) {
      fail(cause, "an exception that is not a std::exception");
    }
    shared.leave(rank, why);
  };
  std::vector<std::thread> workers;
  try {
    for (int r = 0; r < ranks; ++r) workers.emplace_back(run, r);
  } catch (std::exception const& e) { // no thread to be had: those that run must not wait for the others
    for (auto r = narrow<int>(workers.size()); r < ranks; ++r) shared.leave(r, e.what());
    for (auto& worker : workers) worker.join();
    throw config_error("E-comm-008", where, "run_threads: no ", ranks, " threads to be had (", e.what(), ")");
  }
  for (auto& worker : workers) worker.join();
  if (cause) std::rethrow_exception(cause);
  if (consequence) std::rethrow_exception(consequence);
}

} // namespace tessera::inline TESSERA_ABI::comm

#endif
