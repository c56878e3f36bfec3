/// Which rows of a vocabulary's matrix, or columns of its logits, a rank holds.
#ifndef TESSERA_OPS_DETAIL_VOCABULARY_SLICE_HPP
#define TESSERA_OPS_DETAIL_VOCABULARY_SLICE_HPP

#include <tessera/core/error.hpp>
#include <tessera/core/extents.hpp>

namespace tessera::inline TESSERA_ABI::ops::detail {

/// Numbers [first, first + size) of [0, vocabulary).
struct vocabulary_slice {
  index_t first, size, vocabulary;

  /// `whole` = 0: the slice is all there is. Throws size_error for one that is no part of the whole.
  vocabulary_slice(char const* operation, index_t first_number, index_t count, index_t whole, site where)
      : first(first_number), size(count), vocabulary(whole == 0 ? count : whole) {
    if (first < 0 || size > vocabulary || first > vocabulary - size)
      throw size_error("E-ops-014", where, operation, ": numbers ", first, " + ", size,
                       " are no part of a vocabulary of ", vocabulary);
  }

  TESSERA_HOST_DEVICE constexpr bool known(index_t number) const noexcept {
    return number >= 0 && number < vocabulary;
  }
  /// Which one of the slice it is; -1 where it is another slice's.
  TESSERA_HOST_DEVICE constexpr index_t place_of(index_t number) const noexcept {
    return number >= first && number - first < size ? number - first : -1;
  }
};

} // namespace tessera::inline TESSERA_ABI::ops::detail

#endif
