/// Which heads each rank has when heads are spread over ranks, and how what the ranks exchange is laid out.
#ifndef TESSERA_PARALLEL_DETAIL_HEAD_GROUPS_HPP
#define TESSERA_PARALLEL_DETAIL_HEAD_GROUPS_HPP

#include <tessera/parallel/context_options.hpp>

namespace tessera::inline TESSERA_ABI::parallel::detail {

/// Query heads are cut into equal parts. Key heads that the parts share are there once for each part that
/// reads them; a part with a fraction of one group has that one key head, and one that begins or ends within
/// groups has a key head for each of its query heads.
struct head_groups {
  index_t heads, key_heads;
  int ranks;

  constexpr index_t queries() const noexcept { return heads / ranks; }
  /// Key heads that a part has, repetitions counted.
  constexpr index_t keys() const noexcept {
    return key_heads % ranks == 0 ? key_heads / ranks : ranks % key_heads == 0 ? 1 : queries();
  }
  constexpr index_t first_query(int rank) const noexcept { return rank * queries(); }
  /// The key head in place `at` of a part.
  constexpr index_t key(int rank, index_t at) const noexcept {
    return key_heads == 0 ? 0 : (first_query(rank) + at * (queries() / keys())) / (heads / key_heads);
  }
  /// Each key head belongs to one part alone.
  constexpr bool keys_are_divided() const noexcept { return key_heads % ranks == 0; }
};

} // namespace tessera::inline TESSERA_ABI::parallel::detail

#endif
