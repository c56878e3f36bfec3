/// The checks that every operation makes before it touches memory. They throw size_error with the name of the
/// operation and of the argument, what was expected and what came.
///
///     require_extents("layer_norm", "gain", gain, {width}, where);
#ifndef TESSERA_OPS_SHAPES_HPP
#define TESSERA_OPS_SHAPES_HPP

#include <tessera/core/scalar.hpp>
#include <tessera/core/view.hpp>

namespace tessera::inline TESSERA_ABI::ops {

/// An input whose storage type need not be that of the output.
template <class X, int Rank, class Memory>
concept scalar_input = readable<X, Rank, Memory> && storage_scalar<value_of<X>>;

/// The argument has exactly these extents.
template <class T, int Rank, memory_space M>
void require_extents(char const* operation, char const* argument, view<T, Rank, M> given,
                     std::type_identity_t<extents<Rank>> const& expected, site where) {
  if (given.extents() != expected)
    throw size_error("E-ops-001", where, operation, ": ", argument, " has extents ", text_of(given.extents()),
                     ", expected ", text_of(expected));
}

/// The same, or the argument is left out (an empty view).
template <class T, int Rank, memory_space M>
void require_extents_or_none(char const* operation, char const* argument, view<T, Rank, M> given,
                             std::type_identity_t<extents<Rank>> const& expected, site where) {
  if (given.data() != nullptr) require_extents(operation, argument, given, expected, where);
}

/// The elements of each row are adjacent. Rows may lie apart, in any order of the outer dimensions.
template <class T, int Rank, memory_space M>
void require_dense_rows(char const* operation, char const* argument, view<T, Rank, M> given, site where) {
  if (given.extent(Rank - 1) > 1 && given.stride(Rank - 1) != 1)
    throw size_error("E-ops-002", where, operation, ": the last stride of ", argument, " is ",
                     given.stride(Rank - 1), ", must be 1");
}

/// All elements are adjacent, in row-major order.
template <class T, int Rank, memory_space M>
void require_contiguous(char const* operation, char const* argument, view<T, Rank, M> given, site where) {
  if (!given.contiguous())
    throw size_error("E-ops-003", where, operation, ": ", argument, " (extents ", text_of(given.extents()),
                     ", strides ", text_of(given.strides()), ") has gaps, must be contiguous");
}

/// Exactly these extents, with dense rows.
template <class T, int Rank, memory_space M>
void require_rows(char const* operation, char const* argument, view<T, Rank, M> given,
                  std::type_identity_t<extents<Rank>> const& expected, site where) {
  require_extents(operation, argument, given, expected, where);
  require_dense_rows(operation, argument, given, where);
}

} // namespace tessera::inline TESSERA_ABI::ops

#endif
