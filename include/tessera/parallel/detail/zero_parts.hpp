/// Which parts of its units' blocks a rank keeps, adds up, updates and counts: arithmetic, the same before
/// anything is allocated and afterwards.
#ifndef TESSERA_PARALLEL_DETAIL_ZERO_PARTS_HPP
#define TESSERA_PARALLEL_DETAIL_ZERO_PARTS_HPP

#include <span>

#include <tessera/parallel/detail/block_pool.hpp>
#include <tessera/parallel/memory_plan.hpp>
#include <tessera/parallel/zero_options.hpp>

namespace tessera::inline TESSERA_ABI::parallel::detail {

/// The reproducible norm adds up this many pieces of each block: enough for as many ranks, and few beside the
/// block.
inline constexpr int reproducible_pieces = 64;

inline layout::ownership ownership_of(int rank, int ranks, zero_options const& options) {
  return {rank, ranks, options.reproducible ? reproducible_pieces : 0};
}

/// One unit, seen by one rank.
struct unit_part {
  zero_unit given;
  index_t size = 0;      ///< Elements of the block.
  bool trained = false;  ///< Something in it is not frozen.
  bool pooled = false;   ///< Its gradients are lent in blocks of the pool.
  layout::range weights; ///< Kept of the weights,
  layout::range share;   ///< of the sum of the gradients, and of the state; what this rank updates.
  std::vector<layout::range> updated; ///< Stretches of the share.
};

/// The stretches of `part` that hold wanted parameters only, gaps between them taken along; all of `part`
/// where there is no other parameter in it.
template <std::predicate<layout::parameter const&> Wanted>
std::vector<layout::range> stretches_of(layout::parameter_map const& map, layout::range part,
                                        Wanted&& wanted) {
  std::vector<layout::range> found;
  bool joined = false, all = true;
  for (auto const& p : map) {
    auto const shared = layout::intersection(p.where(), part);
    if (shared.empty()) continue;
    if (!wanted(p)) {
      joined = all = false;
      continue;
    }
    if (joined)
      found.back().end = shared.end;
    else
      found.push_back(shared);
    joined = true;
  }
  if (!all || part.empty()) return found;
  return {part};
}

inline bool is_frozen(zero_options const& options, layout::parameter const& p) {
  return options.frozen && options.frozen(p);
}

/// Throws config_error (E-parallel-010) for units that are none.
inline std::vector<unit_part> parts_of(std::span<zero_unit const> units, layout::ownership who,
                                       zero_options const& options, site where) {
  std::vector<unit_part> parts;
  for (std::size_t u = 0; u < units.size(); ++u) {
    auto const& given = units[u];
    auto const tied = given.tied;
    if (given.map == nullptr || (tied != no_unit && (tied >= units.size() || tied == u)))
      throw config_error("E-parallel-010", where, "zero: unit ", u, " of ", units.size(),
                         given.map == nullptr ? " has no parameter map; give it that of the unit that runs"
                                              : " is tied to a unit that does not exist, or to itself; name "
                                                "another one of the list");
    auto& part = parts.emplace_back();
    part.given = given;
    if (given.number == no_unit) part.given.number = u;
    part.size = given.map->block_size();
    for (auto const& p : *given.map) part.trained = part.trained || (p.size > 0 && !is_frozen(options, p));
    part.pooled = options.stage >= 2 || !part.trained;
    part.weights = kept_weights(part.size, who, options.stage);
    part.share = kept_state(part.size, who, options.stage);
    if (part.trained && given.owned)
      part.updated =
          stretches_of(*given.map, part.share, [&](auto const& p) { return !is_frozen(options, p); });
  }
  return parts;
}

/// What of `within` this rank's norm counts.
inline std::vector<layout::range> counted_in(unit_part const& part, layout::range within, int tensor_rank,
                                             zero_options const& options) {
  if (!part.trained || !part.given.owned) return {};
  return stretches_of(*part.given.map, within, [&](auto const& p) {
    return !is_frozen(options, p) && layout::counts(p, tensor_rank);
  });
}

/// The gradients that stay until the update: blocks, or shards of them.
inline layout::range kept_gradients_of(unit_part const& part, int stage) {
  if (!part.trained) return {0, 0};
  return stage >= 2 ? part.share : layout::range{0, part.size};
}

/// Whether micro-batches' gradients are added up by a tree, each in a block of its own.
inline bool is_stacked(unit_part const& part, zero_options const& options) {
  return options.reproducible && part.trained;
}

/// Sums of the tree over n micro-batches that are there at once: one for each bit of n.
constexpr std::size_t stack_depth(index_t micro_batches) noexcept {
  std::size_t depth = 0;
  for (; micro_batches > 0; micro_batches /= 2) ++depth;
  return depth;
}

/// The pool of gradients. Of those that go to a shard micro-batch by micro-batch, some are on their way, some
/// are being written, one is a tied one, and one was kept from a forward to its backward.
inline std::vector<shelf> gradient_shelves(std::vector<unit_part> const& parts, zero_options const& options) {
  auto const depth = stack_depth(options.micro_batches);
  std::vector<index_t> sizes;
  for (auto const& part : parts)
    if (is_stacked(part, options))
      sizes.insert(sizes.end(), part.pooled ? depth : depth - 1, part.size);
    else if (part.pooled)
      sizes.push_back(part.size);
  auto const together =
      static_cast<std::size_t>(options.in_flight) + static_cast<std::size_t>(options.open_units) + 2;
  return shelves_of(sizes, options.reproducible ? sizes.size() : together);
}

/// The pool of gathered weights of stage 3: of the unit that runs, the one after it, and a tied one.
inline std::vector<shelf> weight_shelves(std::vector<unit_part> const& parts, zero_options const& options) {
  if (options.stage < 3) return {};
  std::vector<index_t> sizes;
  bool tied = false;
  for (auto const& part : parts) {
    sizes.push_back(part.size);
    tied = tied || part.given.tied != no_unit;
  }
  return shelves_of(sizes, static_cast<std::size_t>(options.prefetch) + (tied ? 2 : 1));
}

} // namespace tessera::inline TESSERA_ABI::parallel::detail

#endif
