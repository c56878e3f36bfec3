/// Sizes of a rank-N array: 64-bit, row-major (the last index runs fastest).
#ifndef TESSERA_CORE_EXTENTS_HPP
#define TESSERA_CORE_EXTENTS_HPP

#include <array>
#include <cstdint>
#include <limits>
#include <utility>

#include <tessera/core/error.hpp>

namespace tessera::inline TESSERA_ABI {

/// All sizes, strides, counts and offsets, in elements.
using index_t = std::int64_t;

/// Sizes of a rank-N array, outermost first.
template <int Rank>
using extents = std::array<index_t, static_cast<std::size_t>(Rank)>;

/// Number of elements. Throws size_error for a negative extent or a product beyond 2^63 - 1.
template <std::size_t Rank>
constexpr index_t element_count(std::array<index_t, Rank> const& sizes, site where = site::here()) {
  index_t count = 1;
  bool empty = false;
  for (auto size : sizes) {
    if (size < 0) throw size_error("E-core-001", where, "an extent is negative: ", size);
    empty = empty || size == 0;
    if (size != 0 && count > std::numeric_limits<index_t>::max() / size)
      throw size_error("E-core-002", where, "extents multiply to more than 2^63 - 1 elements");
    if (size != 0) count *= size;
  }
  return empty ? 0 : count;
}

/// Narrows an integer, or throws size_error: the one place where 64-bit counts meet narrower interfaces.
template <std::integral To, std::integral From>
constexpr To narrow(From value, site where = site::here()) {
  if (!std::in_range<To>(value))
    throw size_error("E-core-003", where, "the value ", value, " does not fit a ", sizeof(To),
                     "-byte integer");
  return static_cast<To>(value);
}

/// "[2, 3, 5]", for messages.
template <std::size_t Rank>
std::string text_of(std::array<index_t, Rank> const& sizes) {
  std::string text = "[";
  for (std::size_t d = 0; d < Rank; ++d) text += (d ? ", " : "") + std::to_string(sizes[d]);
  return text + "]";
}

} // namespace tessera::inline TESSERA_ABI

#endif
