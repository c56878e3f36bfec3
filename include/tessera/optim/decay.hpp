/// Which parameters weight decay acts on, chosen by kind. By default those of two dimensions, matrices and
/// embeddings, and neither biases nor the gains of norms (the habit of GPT-2's trainers).
///
///     auto decayed = optim::decayed_ranges(map, {.position_embedding = false});
#ifndef TESSERA_OPTIM_DECAY_HPP
#define TESSERA_OPTIM_DECAY_HPP

#include <span>

#include <tessera/layout/parameters.hpp>

namespace tessera::inline TESSERA_ABI::optim {

struct decay_rule {
  bool matrix = true;
  bool token_embedding = true;
  bool position_embedding = true;
  bool bias = false;
  bool norm_gain = false;
  bool norm_bias = false;

  constexpr bool operator()(layout::parameter_kind kind) const noexcept {
    switch (kind) {
    case layout::parameter_kind::matrix:
      return matrix;
    case layout::parameter_kind::token_embedding:
      return token_embedding;
    case layout::parameter_kind::position_embedding:
      return position_embedding;
    case layout::parameter_kind::bias:
      return bias;
    case layout::parameter_kind::norm_gain:
      return norm_gain;
    case layout::parameter_kind::norm_bias:
      return norm_bias;
    }
    return false;
  }
};

/// The decayed parameters of a unit's block as ranges of that block, in order.
inline std::vector<layout::range> decayed_ranges(layout::parameter_map const& map, decay_rule rule = {}) {
  std::vector<layout::range> ranges;
  for (auto const& p : map)
    if (rule(p.kind) && p.size > 0) ranges.push_back(p.where());
  return ranges;
}

/// What `part` holds of some ranges, counted from the beginning of `part`: the mask of a shard.
inline std::vector<layout::range> ranges_within(std::span<layout::range const> ranges, layout::range part) {
  std::vector<layout::range> inside;
  for (auto const& r : ranges) {
    auto const shared = layout::intersection(r, part);
    if (!shared.empty()) inside.push_back({shared.begin - part.begin, shared.end - part.begin});
  }
  return inside;
}

} // namespace tessera::inline TESSERA_ABI::optim

#endif
