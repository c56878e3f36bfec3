/// Reads what ranks said they are doing: do they agree, and whom does a call that got stuck wait for?
#ifndef TESSERA_COMM_DETAIL_AGREEMENT_HPP
#define TESSERA_COMM_DETAIL_AGREEMENT_HPP

#include <vector>

#include <tessera/comm/detail/call.hpp>

namespace tessera::inline TESSERA_ABI::comm::detail {

/// "rank 2 (it is in barrier at ...), rank 3 (it is in no call that waits)", seen from rank `self`, which is
/// in `sign`. A rank that answered from the same or a later collective has arrived.
inline std::string missing_ranks(signature const& sign, int self, std::vector<signature> const& theirs,
                                 std::vector<char> const& answered) {
  bool const message = sign.what == collective::send || sign.what == collective::receive;
  std::string missing;
  for (int r = 0; r < narrow<int>(theirs.size()); ++r) {
    auto const i = static_cast<std::size_t>(r);
    if (r == self || (message && r != sign.root)) continue;
    if (!message && answered[i] != 0 && (theirs[i].sequence > sign.sequence || agree(theirs[i], sign)))
      continue;
    missing += tessera::text_of(missing.empty() ? "rank " : ", rank ", r);
    missing += answered[i] != 0 ? " (it is in " + text_of(theirs[i]) + ")"
                                : std::string(" (it is in no call that waits)");
  }
  return missing.empty() ? "the transfer itself: all ranks have arrived" : missing;
}

/// `all`: the signature of each rank.
inline void compare_signatures(signature const* all, int ranks, int self, site where) {
  for (int r = 1; r < ranks; ++r)
    if (!agree(all[0], all[r]))
      throw collective_mismatch("E-comm-010", where, "ranks called different collectives: rank 0 ",
                                text_of(all[0]), ", rank ", r, " ", text_of(all[r]), "; this is rank ", self);
}

/// `all`: of each rank, what it sends to each and what it expects from each.
inline void compare_counts(index_t const* all, int ranks, signature const& sign, site where) {
  auto const p = index_t{ranks};
  for (index_t from = 0; from < p; ++from)
    for (index_t to = 0; to < p; ++to)
      if (auto sent = all[from * 2 * p + to], expected = all[to * 2 * p + p + from]; sent != expected)
        throw collective_mismatch("E-comm-011", where, text_of(sign), ": rank ", from, " sends ", sent,
                                  " elements to rank ", to, ", which expects ", expected);
}

/// A rank's options, as they travel.
struct communicator_terms {
  double checked = 0, stall_limit = 0;
  communicator_terms() = default;
  explicit communicator_terms(communicator_options options) noexcept
      : checked(options.checked ? 1 : 0), stall_limit(options.stall_limit) {}
};

/// `all`: the terms of each rank.
inline void compare_terms(std::vector<communicator_terms> const& all, int self, site where) {
  for (std::size_t r = 1; r < all.size(); ++r)
    if (all[r].checked != all[0].checked || all[r].stall_limit != all[0].stall_limit)
      throw config_error("E-comm-031", where,
                         "the ranks' communicator options differ: rank 0 has checked = ", all[0].checked != 0,
                         ", stall_limit = ", all[0].stall_limit, ", rank ", r,
                         " has checked = ", all[r].checked != 0, ", stall_limit = ", all[r].stall_limit,
                         "; this is rank ", self);
}

} // namespace tessera::inline TESSERA_ABI::comm::detail

#endif
