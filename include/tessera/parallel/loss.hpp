/// The loss of all ranks: sums and counts travel, the one division comes last.
///
///     auto total = parallel::sum_over_ranks(comm, local);      // every rank: the same bits
///     auto nats_per_token = parallel::mean_of(total);          // 0 where nothing was predicted
#ifndef TESSERA_PARALLEL_LOSS_HPP
#define TESSERA_PARALLEL_LOSS_HPP

#include <tessera/comm/communicator.hpp>
#include <tessera/nn/unit.hpp>

namespace tessera::inline TESSERA_ABI::parallel {

/// Called by every rank; a rank that predicted nothing gives {0, 0}. Cost: one message of 16 bytes.
template <comm::communicator Comm>
nn::loss_sum sum_over_ranks(Comm& comm, nn::loss_sum local) {
  double values[] = {local.sum, local.count};
  comm.all_reduce(std::span<double>(values), comm::reduce_options{});
  return {values[0], values[1]};
}

/// Of what has been summed over all micro-batches and ranks.
constexpr double mean_of(nn::loss_sum total) noexcept {
  return total.count > 0 ? total.sum / total.count : 0;
}

} // namespace tessera::inline TESSERA_ABI::parallel

#endif
