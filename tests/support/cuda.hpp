/// What tests of CUDA code share: tensors on the device, placed at odd addresses and with gaps between rows,
/// and brought back with a look at whether anything beside them was written.
///
///     exec::cuda ex;
///     test::on_device<float, 2> x(ex, reference::normal<float, 2>({7, 129}, 1), {.offset = 1, .gap = 3});
///     ops::scale(ex, ...x.view()...);
///     CHECK(reference::max_relative_error(x.read(ex), expected) < 1e-5);
#ifndef TESSERA_TESTS_SUPPORT_CUDA_HPP
#define TESSERA_TESTS_SUPPORT_CUDA_HPP

#include <cstring>
#include <vector>

#include <doctest/doctest.h>

#include <tessera/exec/copy_cuda.hpp>

namespace test {

using tessera::index_t;

template <class T, int Rank>
using device_view = tessera::view<T, Rank, tessera::exec::cuda_memory>;

/// Where an array stands in its memory, in elements.
struct placement {
  index_t offset = 0; ///< In front of the first one: 0 is aligned to 256 bytes, 1 is not even to 16.
  index_t gap = 0;    ///< Between one row (of the last extent) and the next.
};

/// An array on the device with guards of known bytes around it and in its gaps.
template <class T, int Rank>
class on_device {
public:
  on_device(tessera::exec::cuda& ex, tessera::tensor<T, Rank> const& from, placement where = {})
      : extents_(from.extents()), width_(from.extent(Rank - 1)), rows_(width_ > 0 ? from.size() / width_ : 0),
        where_(where) {
    auto const count = where.offset + rows_ * (width_ + where.gap) + guard;
    std::vector<T> all(static_cast<std::size_t>(count));
    std::memset(static_cast<void*>(all.data()), pattern, all.size() * sizeof(T));
    for (index_t row = 0; row < rows_; ++row)
      for (index_t i = 0; i < width_; ++i)
        all[static_cast<std::size_t>(place(row, i))] = from.data()[row * width_ + i];
    memory_ = tessera::tensor<T, 1, tessera::exec::cuda_memory>({count});
    tessera::exec::copy(ex, memory_.span(), std::span<T const>(all));
  }
  /// Of zeros.
  on_device(tessera::exec::cuda& ex, tessera::extents<Rank> const& sizes, placement where = {})
      : on_device(ex, tessera::tensor<T, Rank>(sizes), where) {}

  device_view<T, Rank> view() {
    tessera::extents<Rank> strides;
    index_t stride = 1;
    for (int d = Rank - 1; d >= 0; --d) {
      strides[static_cast<std::size_t>(d)] = stride;
      stride = d == Rank - 1 ? width_ + where_.gap : stride * extents_[static_cast<std::size_t>(d)];
    }
    return {memory_.data() + where_.offset, extents_, strides};
  }
  operator device_view<T, Rank>() { return view(); }       // NOLINT
  operator device_view<T const, Rank>() { return view(); } // NOLINT

  /// Waits for the stream. Fails the test where a guard is no longer what it was.
  tessera::tensor<T, Rank> read(tessera::exec::cuda& ex) {
    std::vector<T> all(static_cast<std::size_t>(memory_.size()));
    tessera::exec::copy(ex, std::span<T>(all), memory_.span());
    tessera::tensor<T, Rank> out(extents_);
    T guard_value;
    std::memset(static_cast<void*>(&guard_value), pattern, sizeof(T));
    std::vector<bool> inside(all.size());
    for (index_t row = 0; row < rows_; ++row)
      for (index_t i = 0; i < width_; ++i) {
        auto const at = static_cast<std::size_t>(place(row, i));
        inside[at] = true;
        out.data()[row * width_ + i] = all[at];
      }
    auto untouched = true;
    for (std::size_t i = 0; i < all.size(); ++i)
      untouched = untouched && (inside[i] || std::memcmp(&all[i], &guard_value, sizeof(T)) == 0);
    CHECK_MESSAGE(untouched, "something beside the array was written");
    return out;
  }

private:
  static constexpr index_t guard = 16;
  static constexpr int pattern = 0x5a;

  index_t place(index_t row, index_t i) const { return where_.offset + row * (width_ + where_.gap) + i; }

  tessera::extents<Rank> extents_;
  index_t width_, rows_;
  placement where_;
  tessera::tensor<T, 1, tessera::exec::cuda_memory> memory_;
};

} // namespace test

#endif
