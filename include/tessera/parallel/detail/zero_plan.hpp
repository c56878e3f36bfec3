/// What ZeRO keeps on a rank, before anything is allocated.
#ifndef TESSERA_PARALLEL_DETAIL_ZERO_PLAN_HPP
#define TESSERA_PARALLEL_DETAIL_ZERO_PLAN_HPP

#include <tessera/parallel/detail/gradient_sums.hpp>
#include <tessera/parallel/detail/shared_block.hpp>

namespace tessera::inline TESSERA_ABI::parallel::detail {

/// What a communicator keeps for a reduction of n elements over `ranks`.
template <class Comm, class X>
constexpr index_t scratch_of(index_t n, int ranks) {
  if constexpr (requires { Comm::template scratch_bytes<X>(index_t{}, int{}); })
    return Comm::template scratch_bytes<X>(n, ranks);
  else
    return 0;
}

/// Memory that communicators keep for the largest messages under way at once.
template <class Comm, class G>
index_t communicators_bytes(std::vector<unit_part> const& parts, layout::ownership who,
                            zero_group_sizes const& sizes, zero_options const& options) {
  index_t among_gradients = 0, among_replicas = 0, among_tensor = 0;
  auto const raise = [](index_t& largest, index_t bytes) { largest = (std::max)(largest, bytes); };
  for (auto const& part : parts) {
    if (!part.trained) continue;
    index_t longest = 0; // parts are uneven, and the slices are as long as the longest of them
    for (int r = 0; r < who.ranks; ++r) raise(longest, who.of(part.size, r).size());
    if (options.stage > 0) raise(among_gradients, scratch_of<Comm, G>(longest * who.ranks, who.ranks));
    if (sizes.replicas > 1) raise(among_replicas, scratch_of<Comm, G>(part.share.size(), sizes.replicas));
    for (auto const& each : summed_stretches_of(part))
      for (auto const& r : each.stretches) raise(among_tensor, scratch_of<Comm, G>(r.size(), each.copies));
  }
  if (options.stage == 0)
    for (auto const& b : gradient_buckets<G>(gradient_places(parts, 0), options))
      raise(among_gradients, scratch_of<Comm, G>(b.elements.size(), who.ranks));
  auto under_way = index_t{options.in_flight}; // gathers ahead may use the same memory later
  if (options.stage == 3) under_way += 2 * (1 + options.prefetch);
  auto bytes = under_way * among_gradients + options.in_flight * among_replicas + among_tensor;
  index_t units = 0;
  for (auto const& part : parts) units = (std::max)(units, static_cast<index_t>(part.given.number) + 1);
  auto const pieces = 2 + static_cast<index_t>(parts.size()) * reproducible_pieces;
  bytes += scratch_of<Comm, double>(options.reproducible ? 2 + units : 3, sizes.world);
  if (options.reproducible)
    bytes += scratch_of<Comm, double>(pieces, who.ranks) + scratch_of<Comm, double>(pieces, sizes.replicas);
  return bytes;
}

template <class Comm, storage_scalar T, storage_scalar G>
memory_plan plan_of(std::span<zero_unit const> units, zero_group_sizes const& sizes, index_t state_bytes,
                    zero_options const& options, site where) {
  auto const who = ownership_of(sizes.rank, sizes.ranks, options);
  auto const parts = parts_of(units, who, options, where);
  memory_plan plan;
  for (auto const& part : parts) {
    plan.parameters += part.weights.size() * static_cast<index_t>(sizeof(T));
    plan.gradients += kept_gradients_of(part, options.stage).size() * static_cast<index_t>(sizeof(G));
    for (auto const& r : part.updated) plan.optimizer_state += r.size() * state_bytes;
  }
  plan.communication = communicators_bytes<Comm, G>(parts, who, sizes, options) +
                       elements_of(gradient_shelves(parts, options)) * static_cast<index_t>(sizeof(G)) +
                       elements_of(weight_shelves(parts, options)) * static_cast<index_t>(sizeof(T));
  if (sizes.shared_block < parts.size())
    plan.communication +=
        arriving_elements<G>(parts[sizes.shared_block], options) * static_cast<index_t>(sizeof(G));
  return plan;
}

} // namespace tessera::inline TESSERA_ABI::parallel::detail

#endif
