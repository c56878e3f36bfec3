/// A rank's share of the machine that it runs on, where other ranks may run too: which of them it is, and how
/// many cores it may keep busy.
///
///     auto const share = train::node_share_of(comm);
///     exec::host ex({.threads = share.cores});
///     exec::cuda gpu({.device = share.rank % exec::cuda_devices()});
///
/// A core is divided among the ranks that may run on it. So a launcher that binds each rank to cores of its
/// own and one that binds nothing are both understood, on one machine and on many.
#ifndef TESSERA_TRAIN_NODE_SHARE_HPP
#define TESSERA_TRAIN_NODE_SHARE_HPP

#include <algorithm>
#include <cstring>
#include <thread>
#include <vector>

#include <sched.h>
#include <unistd.h>

#include <tessera/comm/communicator.hpp>

namespace tessera::inline TESSERA_ABI::train {

struct node_share {
  int rank = 0;  ///< Among the ranks of this machine, in the order of ranks.
  int ranks = 1; ///< On this machine.
  int cores = 1; ///< At least one.
};

namespace detail {

/// What a rank tells the others.
struct node_place {
  char name[64] = {}; ///< Of the machine.
  cpu_set_t cores{};  ///< Those that the rank may run on.
};

inline node_place place_here() {
  node_place here;
  ::gethostname(here.name, sizeof here.name - 1);
  if (::sched_getaffinity(0, sizeof here.cores, &here.cores) != 0) { // a machine of more than 1024 cores
    auto const all = std::min<std::size_t>(std::thread::hardware_concurrency(), CPU_SETSIZE);
    for (std::size_t core = 0; core < all; ++core) CPU_SET(core, &here.cores);
  }
  return here;
}

inline node_share share_of(int rank, std::vector<node_place> const& places) {
  auto const& mine = places[static_cast<std::size_t>(rank)];
  auto const is_here = [&](node_place const& other) { return std::strcmp(other.name, mine.name) == 0; };
  node_share share{narrow<int>(std::count_if(places.begin(), places.begin() + rank, is_here)),
                   narrow<int>(std::count_if(places.begin(), places.end(), is_here))};
  auto cores = 1e-6; // sums of thirds are not exact
  for (std::size_t core = 0; core < CPU_SETSIZE; ++core)
    if (CPU_ISSET(core, &mine.cores))
      cores += 1.0 / static_cast<double>(std::count_if(places.begin(), places.end(), [&](auto const& other) {
                 return is_here(other) && CPU_ISSET(core, &other.cores);
               }));
  share.cores = std::max(1, narrow<int>(static_cast<index_t>(cores)));
  return share;
}

} // namespace detail

/// Called by every rank of `comm`. Cost: one all_gather of 192 bytes a rank.
template <comm::communicator Comm>
node_share node_share_of(Comm& comm) {
  std::vector<detail::node_place> places(static_cast<std::size_t>(comm.size()));
  auto const here = detail::place_here();
  comm.all_gather(std::as_writable_bytes(std::span(places)), std::as_bytes(std::span(&here, 1)));
  return detail::share_of(comm.rank(), places);
}

} // namespace tessera::inline TESSERA_ABI::train

#endif
