/// Requests under way at once, at most so many, waited for in the order in which they were made.
#ifndef TESSERA_PARALLEL_DETAIL_REQUEST_QUEUE_HPP
#define TESSERA_PARALLEL_DETAIL_REQUEST_QUEUE_HPP

#include <vector>

namespace tessera::inline TESSERA_ABI::parallel::detail {

/// `Cargo`: what is to be remembered of each.
template <class Request, class Cargo>
class request_queue {
public:
  explicit request_queue(int most) : ring_(static_cast<std::size_t>(most)) {}

  bool empty() const noexcept { return count_ == 0; }
  bool full() const noexcept { return count_ == ring_.size(); }

  /// Where it is not full.
  void push(Request&& request, Cargo const& cargo) {
    auto& last = ring_[(oldest_ + count_) % ring_.size()];
    last.request = static_cast<Request&&>(request);
    last.cargo = cargo;
    ++count_;
  }
  /// Where it is not empty.
  Cargo wait_for_oldest() {
    auto& first = ring_[oldest_];
    oldest_ = (oldest_ + 1) % ring_.size();
    --count_;
    first.request.wait();
    return first.cargo;
  }
  void wait_for_all() {
    while (!empty()) (void)wait_for_oldest();
  }
  /// Lets what is under way advance, and waits for nothing.
  void drive() {
    for (std::size_t i = 0; i < count_; ++i) (void)ring_[(oldest_ + i) % ring_.size()].request.test();
  }

private:
  struct entry {
    Request request;
    Cargo cargo;
  };
  std::vector<entry> ring_;
  std::size_t oldest_ = 0, count_ = 0;
};

} // namespace tessera::inline TESSERA_ABI::parallel::detail

#endif
