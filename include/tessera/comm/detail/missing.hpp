/// Reads what ranks said they are doing: whom does a call that got stuck wait for?
#ifndef TESSERA_COMM_DETAIL_MISSING_HPP
#define TESSERA_COMM_DETAIL_MISSING_HPP

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

} // namespace tessera::inline TESSERA_ABI::comm::detail

#endif
