/// Which samples of a step a rank works on, and in which portions: the batch is cut evenly among the ranks
/// and each rank's share into micro-batches. A sample's number within the batch does not depend on either.
///
///     for (auto const& part : micro_batches(layout::shard_of(batch, ranks, rank), 8)) ...   // ranges of the
///     batch
#ifndef TESSERA_TRAIN_MICRO_BATCHES_HPP
#define TESSERA_TRAIN_MICRO_BATCHES_HPP

#include <vector>

#include <tessera/layout/shard.hpp>

namespace tessera::inline TESSERA_ABI::train {

/// Postconditions: in order, disjoint, cover `share`; each has 1 to `most` samples. None for an empty share.
inline std::vector<layout::range> micro_batches(layout::range share, index_t most) {
  std::vector<layout::range> parts;
  for (auto at = share.begin; at < share.end; at += most)
    parts.push_back({at, at + most < share.end ? at + most : share.end});
  return parts;
}

} // namespace tessera::inline TESSERA_ABI::train

#endif
