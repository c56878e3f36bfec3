/// Where the rows of two arrays with four extents stand, row by row, for backends that walk both at once.
#ifndef TESSERA_OPS_DETAIL_ROW_PLACES_HPP
#define TESSERA_OPS_DETAIL_ROW_PLACES_HPP

#include <tessera/core/view.hpp>

namespace tessera::inline TESSERA_ABI::ops::detail {

/// `rows` rows of `width` elements. Neighbouring heads whose rows are adjacent in both arrays are one row.
template <class To, class From>
struct row_places {
  To* to;
  From* from;
  index_t rows, width, tokens, heads;
  index_t to_stride[3], from_stride[3];

  template <memory_space M>
  row_places(view<To, 4, M> out, view<From, 4, M> in)
      : to(out.data()), from(in.data()), rows(out.extent(0) * out.extent(1) * out.extent(2)),
        width(out.extent(3)), tokens(out.extent(1)), heads(out.extent(2)) {
    for (int d = 0; d < 3; ++d) to_stride[d] = out.stride(d), from_stride[d] = in.stride(d);
    if (heads > 1 && to_stride[2] == width && from_stride[2] == width) {
      rows /= heads;
      width *= heads;
      heads = 1;
    }
  }

  TESSERA_HOST_DEVICE To* to_row(index_t row) const noexcept { return to + offset(row, to_stride); }
  TESSERA_HOST_DEVICE From* from_row(index_t row) const noexcept { return from + offset(row, from_stride); }

private:
  TESSERA_HOST_DEVICE index_t offset(index_t row, index_t const (&stride)[3]) const noexcept {
    auto const token = row / heads;
    return token / tokens * stride[0] + token % tokens * stride[1] + row % heads * stride[2];
  }
};

} // namespace tessera::inline TESSERA_ABI::ops::detail

#endif
