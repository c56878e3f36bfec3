/// What the ranks of an nccl communicator say to each other beside NCCL: where they are when one is stuck.
#ifndef TESSERA_COMM_DETAIL_NCCL_SIDE_HPP
#define TESSERA_COMM_DETAIL_NCCL_SIDE_HPP

#include <memory>

#include <sched.h>

#include <tessera/comm/detail/agreement.hpp>
#include <tessera/comm/detail/request.hpp>

namespace tessera::inline TESSERA_ABI::comm::detail {

class nccl_side {
public:
  struct news {
    bool asked = false;  // another rank has given up, and asks where this one is
    bool failed = false; // there is trouble, and it is a rank's failure; otherwise one has ended
    std::string trouble; // why others can't be reached; empty: nothing is known
  };

  virtual ~nccl_side() = default;
  virtual news poll() = 0;
  /// Says where this rank is, listens for `grace` seconds, and names the ranks that have not arrived there.
  virtual std::string missing(signature const& mine, double grace) = 0;
  virtual std::unique_ptr<nccl_side> split(int color, int key, site where) = 0;
};

/// Over any communicator of the host's memory, by its public calls alone: each rank has a receive open from
/// each other one from the first time that it has to wait.
template <host_communicator Host>
class nccl_side_of final : public nccl_side {
public:
  explicit nccl_side_of(Host&& host) : host_(static_cast<Host&&>(host)) {}
  nccl_side_of(nccl_side_of const&) = delete;
  nccl_side_of& operator=(nccl_side_of const&) = delete;
  ~nccl_side_of() override {
    if (!talk_) return;
    bool told = true; // whether nobody reads what this rank said any more
    for (auto& each : talk_->heard) each.withdraw();
    for (auto& each : talk_->told) {
      try {
        told = each.test() && told;
      } catch (error const&) { // a peer that has failed does not read
      }
      each.abandon();
    }
    if (!told) (void)talk_.release(); // a send can't be called back
  }

  news poll() override {
    if (!trouble_.trouble.empty()) return trouble_; // a receive that has failed is no answer
    news result;
    try {
      listen();
      for (std::size_t r = 0; r < talk_->heard.size(); ++r)
        if (talk_->answered[r] == 0 && rank_of(r) != host_.rank() && talk_->heard[r].test())
          talk_->answered[r] = 1;
      for (auto each : talk_->answered) result.asked = result.asked || each != 0;
    } catch (peer_failed const& e) {
      trouble_ = {false, true, e.what()};
      return trouble_;
    } catch (error const& e) {
      trouble_ = {false, false, e.what()};
      return trouble_;
    }
    return result;
  }

  std::string missing(signature const& mine, double grace) override {
    (void)poll();
    if (!talk_) return "ranks that cannot be asked";
    talk_->mine = mine;
    try {
      for (int r = 0; r < host_.size(); ++r)
        if (r != host_.rank())
          talk_->told.push_back(host_.start_send(bytes_of_signature(talk_->mine), r, tag));
    } catch (error const&) { // those that can't be told don't answer either
    }
    for (auto const start = seconds_now(); seconds_now() - start < grace; ::sched_yield()) {
      if (!poll().trouble.empty()) break;
      int answers = 1;
      for (auto each : talk_->answered) answers += each;
      if (answers == host_.size()) break;
    }
    return missing_ranks(mine, host_.rank(), talk_->theirs, talk_->answered);
  }

  std::unique_ptr<nccl_side> split(int color, int key, site where) override {
    return std::make_unique<nccl_side_of>(host_.split(color, key, where));
  }

private:
  static constexpr int tag = 1;
  struct talk {
    signature mine;
    std::vector<signature> theirs;
    std::vector<char> answered;
    std::vector<typename Host::request> heard, told;
  };

  static int rank_of(std::size_t i) noexcept { return narrow<int>(i); }
  static std::span<std::byte> bytes_of_signature(signature& sign) noexcept {
    return std::as_writable_bytes(std::span<signature>(&sign, 1));
  }
  void listen() {
    if (talk_) return;
    auto const ranks = static_cast<std::size_t>(host_.size());
    talk_ = std::make_unique<talk>();
    talk_->theirs.resize(ranks);
    talk_->answered.assign(ranks, 0);
    talk_->heard.resize(ranks);
    for (std::size_t r = 0; r < ranks; ++r)
      if (rank_of(r) != host_.rank())
        talk_->heard[r] = host_.start_receive(bytes_of_signature(talk_->theirs[r]), rank_of(r), tag);
  }

  Host host_;
  std::unique_ptr<talk> talk_;
  news trouble_;
};

template <host_communicator Host>
std::unique_ptr<nccl_side> side_of(Host& host, site where) {
  return std::make_unique<nccl_side_of<Host>>(host.split(0, host.rank(), where));
}

} // namespace tessera::inline TESSERA_ABI::comm::detail

#endif
