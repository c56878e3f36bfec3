/// What a non-blocking call returns, and the clock of the traffic meter.
#ifndef TESSERA_COMM_DETAIL_REQUEST_HPP
#define TESSERA_COMM_DETAIL_REQUEST_HPP

#include <ctime>

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
template <class Engine>
class request {
  using operation = typename Engine::op;

public:
  request() = default;
  request(Engine& owner, operation& one) noexcept : owner_(&owner), one_(&one) {}
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
    if (!one_->finished && !owner_->advance(*one_)) return false;
    auto* const one = one_;
    one_ = nullptr;
    owner_->free(*one);
    return true;
  }

  /// Gives it up where it has not ended: nobody waits, and its communicator is lost.
  void abandon() noexcept {
    if (one_ == nullptr) return;
    if (one_->finished)
      finish_quietly();
    else
      owner_->abandon(*one_);
    one_ = nullptr;
  }
  /// Takes a receive that nothing has come for back, as if it had never been started.
  void withdraw() noexcept {
    if (one_ == nullptr) return;
    if (one_->finished)
      finish_quietly();
    else
      owner_->withdraw(*one_);
    one_ = nullptr;
  }

private:
  void dispose() noexcept {
    if (one_ == nullptr) return;
    if (!one_->finished && std::uncaught_exceptions() > one_->unwinding)
      owner_->abandon(*one_);
    else
      finish_quietly();
    one_ = nullptr;
  }
  void finish_quietly() noexcept {
    try {
      wait();
    } catch (...) { // a destructor can't say so; the next call on the communicator does
      owner_->lose();
    }
  }

  Engine* owner_ = nullptr;
  operation* one_ = nullptr;
};

} // namespace tessera::inline TESSERA_ABI::comm::detail

#endif
