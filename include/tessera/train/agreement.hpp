/// Ranks that were started with different settings would compute different models and wait for each other in
/// the wrong places. They find out before anything else.
///
///     require_agreement(comm, settings);          // config_error on every rank, naming what differs
#ifndef TESSERA_TRAIN_AGREEMENT_HPP
#define TESSERA_TRAIN_AGREEMENT_HPP

#include <tessera/train/settings.hpp>
#include <tessera/train/together.hpp>

namespace tessera::inline TESSERA_ABI::train {

/// Every rank compares its settings with rank 0's, the allowed differences included. Throws config_error
/// (E-train-041) on the ranks that differ, naming each setting with both values, peer_failed with the same
/// words on the others. Cost: three small messages.
template <comm::communicator Comm>
void require_agreement(Comm& comm, settings const& mine, site where = site::here()) {
  auto const lines_of = [](settings const& s) {
    std::vector<std::string> lines;
    for (auto const& f : fields) lines.push_back(std::string(f.name) + " " + value_text(s, f));
    std::string allowed = "allow_difference";
    for (auto const& name : s.allow_difference) allowed += " " + name;
    lines.push_back(allowed);
    return lines;
  };
  auto const here = lines_of(mine);
  std::string joined;
  for (auto const& line : here) joined += line + '\0';
  auto rest = shared_text(comm, joined);
  together(
      comm,
      [&] {
        std::string differing;
        for (auto const& line : here) {
          auto const end = rest.find('\0');
          auto const there = rest.substr(0, end);
          rest.erase(0, end == std::string::npos ? end : end + 1);
          if (line != there)
            differing += tessera::text_of("\n  rank ", comm.rank(), ": ", line, "; rank 0: ", there);
        }
        if (!differing.empty())
          throw config_error("E-train-041", where,
                             "the ranks were started with different settings:", differing);
      },
      where);
}

} // namespace tessera::inline TESSERA_ABI::train

#endif
