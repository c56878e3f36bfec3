/// A rank-N window on memory that somebody else owns: pointer, extents, strides. Trivially copyable, 64-bit,
/// passed by value. The kind of memory is part of the type, so host and device views do not mix.
///
///     auto m = view<float, 2>(pointer, {rows, columns});
///     m(i, j) = 1.0f;
///     auto head = m.slice(1, 0, 64);           // columns 0..63, same memory
///     auto flat = m.template reshape<1>({m.size()});  // throws size_error where a copy would be needed
#ifndef TESSERA_CORE_VIEW_HPP
#define TESSERA_CORE_VIEW_HPP

#include <concepts>
#include <type_traits>

#include <tessera/core/extents.hpp>
#include <tessera/core/memory_span.hpp>

namespace tessera::inline TESSERA_ABI {

template <class T, int Rank, memory_space Memory = host_memory>
  requires(Rank >= 1)
class view {
public:
  using element_type = T;
  using value_type = std::remove_const_t<T>;
  using memory = Memory;
  static constexpr int rank = Rank;

  constexpr view() = default;

  /// Contiguous, row-major. `sizes` must be non-negative.
  TESSERA_HOST_DEVICE constexpr view(T* data, tessera::extents<Rank> const& sizes) : data_(data) {
    index_t stride = 1;
    for (int d = Rank - 1; d >= 0; --d) {
      extent_[d] = sizes[static_cast<std::size_t>(d)];
      stride_[d] = stride;
      stride *= extent_[d];
    }
  }

  /// With explicit strides, in elements.
  TESSERA_HOST_DEVICE constexpr view(T* data, tessera::extents<Rank> const& sizes,
                                     tessera::extents<Rank> const& strides)
      : data_(data) {
    for (int d = 0; d < Rank; ++d) {
      extent_[d] = sizes[static_cast<std::size_t>(d)];
      stride_[d] = strides[static_cast<std::size_t>(d)];
    }
  }

  /// A view of constant elements from one of mutable elements.
  template <class U>
    requires(std::is_const_v<T>&& std::same_as<U, std::remove_const_t<T>>)
  TESSERA_HOST_DEVICE constexpr view(view<U, Rank, Memory> const& other) // NOLINT: meant to be implicit
      : view(other.data(), other.extents(), other.strides()) {}

  TESSERA_HOST_DEVICE constexpr T* data() const noexcept { return data_; }
  TESSERA_HOST_DEVICE constexpr index_t extent(int d) const noexcept { return extent_[d]; }
  TESSERA_HOST_DEVICE constexpr index_t stride(int d) const noexcept { return stride_[d]; }
  TESSERA_HOST_DEVICE constexpr bool empty() const noexcept { return size() == 0; }

  constexpr tessera::extents<Rank> extents() const noexcept { return copy_of(extent_); }
  constexpr tessera::extents<Rank> strides() const noexcept { return copy_of(stride_); }

  TESSERA_HOST_DEVICE constexpr index_t size() const noexcept {
    index_t count = 1;
    for (int d = 0; d < Rank; ++d) count *= extent_[d];
    return count;
  }

  /// True when the elements lie in row-major order without gaps. Strides of extents 0 and 1 do not matter.
  TESSERA_HOST_DEVICE constexpr bool contiguous() const noexcept {
    index_t expected = 1;
    if (size() == 0) return true;
    for (int d = Rank - 1; d >= 0; --d) {
      if (extent_[d] != 1 && stride_[d] != expected) return false;
      expected *= extent_[d];
    }
    return true;
  }

  /// Where an element stands: for memory that is not reached from here, too.
  template <std::convertible_to<index_t>... Index>
    requires(sizeof...(Index) == Rank)
  TESSERA_HOST_DEVICE constexpr T* address(Index... index) const noexcept {
    index_t const at[] = {static_cast<index_t>(index)...};
    index_t offset = 0;
    for (int d = 0; d < Rank; ++d) offset += at[d] * stride_[d];
    return data_ + offset;
  }
  /// An element, of memory that the processor reaches. (Kernels write `*x.address(i, j)`.)
  template <std::convertible_to<index_t>... Index>
    requires(sizeof...(Index) == Rank && Memory::host_accessible)
  TESSERA_HOST_DEVICE constexpr T& operator()(Index... index) const noexcept { return *address(index...); }

  /// The half-open range [begin, end) of dimension `d`; the same memory.
  constexpr view slice(int d, index_t begin, index_t end, site where = site::here()) const {
    if (d < 0 || d >= Rank || begin < 0 || end < begin || end > extent_[d])
      throw size_error("E-core-004", where, "slice [", begin, ", ", end, ") of dimension ", d,
                       " is outside a view of extents ", text_of(extents()));
    auto result = *this;
    result.data_ = data_ == nullptr ? data_ : data_ + begin * stride_[d];
    result.extent_[d] = end - begin;
    return result;
  }

  /// Index `at` of the outermost dimension: a view of one rank less. (The conditional names a valid type for
  /// rank 1 too, where the member does not exist.)
  constexpr view<T, (Rank > 1 ? Rank - 1 : 1), Memory> operator[](index_t at) const requires(Rank >= 2) {
    tessera::extents<(Rank > 1 ? Rank - 1 : 1)> sizes{}, strides{};
    for (int d = 1; d < Rank; ++d) {
      sizes[static_cast<std::size_t>(d - 1)] = extent_[d];
      strides[static_cast<std::size_t>(d - 1)] = stride_[d];
    }
    return {data_ + at * stride_[0], sizes, strides};
  }

  /// The same elements under other extents. Throws size_error if the counts differ or the view has gaps.
  template <int NewRank>
  constexpr view<T, NewRank, Memory> reshape(tessera::extents<NewRank> const& sizes,
                                             site where = site::here()) const {
    if (element_count(sizes, where) != size())
      throw size_error("E-core-005", where, "cannot reshape ", text_of(extents()), " to ", text_of(sizes),
                       ": the element counts differ");
    if (!contiguous())
      throw size_error("E-core-006", where, "cannot reshape a view with gaps (extents ", text_of(extents()),
                       ", strides ", text_of(strides()), "); copy it into a contiguous tensor first");
    return {data_, sizes};
  }

  /// All elements as one span. Throws size_error if the view has gaps.
  constexpr memory_span<T, Memory> span(site where = site::here()) const {
    if (!contiguous())
      throw size_error("E-core-007", where, "a view with gaps (extents ", text_of(extents()), ", strides ",
                       text_of(strides()), ") is not a span");
    return {data_, static_cast<std::size_t>(size())};
  }

private:
  static constexpr tessera::extents<Rank> copy_of(index_t const (&values)[Rank]) noexcept {
    tessera::extents<Rank> result{};
    for (int d = 0; d < Rank; ++d) result[static_cast<std::size_t>(d)] = values[d];
    return result;
  }

  T* data_ = nullptr;
  index_t extent_[Rank] = {};
  index_t stride_[Rank] = {};
};

/// The parameter type for inputs: a view of constant elements that does not take part in deduction, so that a
/// view of mutable elements is accepted.
template <class T, int Rank, class Memory = host_memory>
using input = std::type_identity_t<view<T const, Rank, Memory>>;

/// The same where the element type is deduced: a view, of constant elements or not, or a tensor.
template <class X, int Rank, class Memory = host_memory>
concept readable = std::convertible_to<X const&, view<typename X::value_type const, Rank, Memory>>;

template <class X>
using value_of = typename X::value_type;

/// What such a parameter is read through.
template <int Rank, class Memory = host_memory, readable<Rank, Memory> X>
constexpr view<value_of<X> const, Rank, Memory> reading(X const& x) noexcept {
  return x;
}

} // namespace tessera::inline TESSERA_ABI

#endif
