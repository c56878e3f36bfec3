/// Views of the parameters in a unit's flat block.
#ifndef TESSERA_NN_DETAIL_PARAMETER_VIEWS_HPP
#define TESSERA_NN_DETAIL_PARAMETER_VIEWS_HPP

#include <tessera/core/memory_span.hpp>
#include <tessera/core/view.hpp>
#include <tessera/layout/parameters.hpp>

namespace tessera::inline TESSERA_ABI::nn::detail {

/// A matrix [rows, columns] or, with one row, a vector inside a block. A unit keeps these instead of looking
/// its parameters up by name at every step. No rows: the unit has no such parameter, and its view is empty.
/// An empty block gives views without memory.
struct place {
  index_t offset = 0;
  index_t rows = 0;
  index_t columns = 0;

  template <memory_space Memory, span_in<Memory> Block>
  view<typename Block::element_type, 2, Memory> matrix(Block block) const noexcept {
    return {start(block), {rows, columns}};
  }
  template <memory_space Memory, span_in<Memory> Block>
  view<typename Block::element_type, 1, Memory> vector(Block block) const noexcept {
    return {start(block), {rows * columns}};
  }

private:
  template <class Block>
  typename Block::element_type* start(Block block) const noexcept {
    return rows == 0 || block.empty() ? nullptr : block.data() + offset;
  }
};

inline place place_of(layout::parameter const& p) {
  return p.shape.size() == 2 ? place{p.offset, p.shape[0], p.shape[1]} : place{p.offset, 1, p.size};
}

} // namespace tessera::inline TESSERA_ABI::nn::detail

#endif
