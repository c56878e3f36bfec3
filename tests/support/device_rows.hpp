/// Rows in device memory at awkward places: what the tests of CUDA's memory-bound operations put their inputs
/// and outputs into.
///
///     device_rows<T> in(ex, x, lying::apart, 1), out(ex, lying::apart, 0, rows, width);
///     ops::cuda_thing(ex, out.rows(), in.rows());
///     CHECK(reference::max_relative_error(out.read(ex), expected) < reference::tolerance<T>());
#ifndef TESSERA_TESTS_SUPPORT_DEVICE_ROWS_HPP
#define TESSERA_TESTS_SUPPORT_DEVICE_ROWS_HPP

#include <tessera/exec/copy_cuda.hpp>

#include <doctest/doctest.h>

#include "support/reference.hpp"

namespace test {

using namespace tessera;

/// Where arrays lie: all on aligned addresses; all at the same distance from one; each at another distance
/// (and their rows with gaps, if there are several).
enum class lying { aligned, shifted, apart };
inline constexpr lying lyings[] = {lying::aligned, lying::shifted, lying::apart};

template <class T>
class device_rows {
public:
  /// Filled with NaN: what an operation does not write is seen. `number` tells the arrays of a call apart.
  device_rows(exec::cuda& ex, lying how, index_t number, index_t rows, index_t width)
      : device_rows(ex, filled(rows, width), how, number) {}

  device_rows(exec::cuda& ex, tensor<T, 2> const& values, lying how, index_t number)
      : sizes_(values.extents()), offset_(how == lying::aligned   ? 8
                                          : how == lying::shifted ? 11
                                                                  : 8 + number),
        stride_(sizes_[1] + (how == lying::apart && sizes_[0] > 1 ? 5 : 0)),
        image_({offset_ + sizes_[0] * stride_ + 8}), memory_(image_.extents()) {
    for (auto& value : image_.span()) value = around();
    for (index_t r = 0; r < sizes_[0]; ++r)
      for (index_t c = 0; c < sizes_[1]; ++c) at(r, c) = values(r, c);
    exec::copy(ex, memory_.span(), std::span<T const>(image_.span()));
  }
  device_rows(exec::cuda& ex, tensor<T, 1> const& values, lying how, index_t number)
      : device_rows(ex, as_row(values), how, number) {}

  view<T, 2, exec::cuda_memory> rows() { return {memory_.data() + offset_, sizes_, {stride_, 1}}; }
  /// All elements in a row, where there are no gaps.
  view<T, 1, exec::cuda_memory> flat() { return rows().template reshape<1>({sizes_[0] * sizes_[1]}); }
  memory_span<T, exec::cuda_memory> span() { return flat().span(); }

  /// The values as they are now; nothing around them may have changed.
  tensor<T, 2> read(exec::cuda& ex) {
    exec::copy(ex, image_.span(), memory_span<T const, exec::cuda_memory>(memory_.span()));
    tensor<T, 2> values(sizes_);
    for (index_t r = 0; r < sizes_[0]; ++r)
      for (index_t c = 0; c < sizes_[1]; ++c) {
        values(r, c) = at(r, c);
        at(r, c) = around();
      }
    bool untouched = true;
    for (auto value : image_.span()) untouched = untouched && value == around();
    CHECK(untouched);
    for (index_t r = 0; r < sizes_[0]; ++r)
      for (index_t c = 0; c < sizes_[1]; ++c) at(r, c) = values(r, c);
    return values;
  }

private:
  static T around() { return T(77.0f); }
  static tensor<T, 2> filled(index_t rows, index_t width) {
    tensor<T, 2> values({rows, width});
    for (auto& value : values.span()) value = T(NAN);
    return values;
  }
  static tensor<T, 2> as_row(tensor<T, 1> const& values) {
    tensor<T, 2> row({1, values.size()});
    for (index_t i = 0; i < values.size(); ++i) row(0, i) = values(i);
    return row;
  }
  T& at(index_t r, index_t c) { return image_(offset_ + r * stride_ + c); }

  extents<2> sizes_;
  index_t offset_, stride_;
  tensor<T, 1> image_;
  tensor<T, 1, exec::cuda_memory> memory_;
};

} // namespace test

#endif
