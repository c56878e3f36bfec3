/// An owning, contiguous, zero-initialised rank-N array of aligned memory. Move-only; functions take its
/// `view`.
///
///     tensor<bf16, 2> x({rows, columns});
///     ops::add(ex, x.view(), a, b);
#ifndef TESSERA_CORE_TENSOR_HPP
#define TESSERA_CORE_TENSOR_HPP

#include <tessera/core/memory.hpp>

namespace tessera::inline TESSERA_ABI {

template <class T, int Rank, memory_space Memory = host_memory>
  requires std::is_trivially_copyable_v<T>
class tensor {
public:
  using value_type = T;

  tensor() = default;
  /// Throws size_error for impossible extents, out_of_memory where memory runs out.
  explicit tensor(tessera::extents<Rank> const& sizes, memory_account account = {}, site where = site::here())
      : extents_(sizes), memory_(bytes_of(sizes, where), account, where) {}

  tessera::view<T, Rank, Memory> view() noexcept { return {data(), extents_}; }
  tessera::view<T const, Rank, Memory> view() const noexcept { return {data(), extents_}; }
  operator tessera::view<T, Rank, Memory>() noexcept { return view(); } // NOLINT: meant to be implicit
  operator tessera::view<T const, Rank, Memory>() const noexcept { return view(); } // NOLINT
  operator tessera::view<T const, Rank, Memory>() noexcept { return view(); }       // NOLINT

  memory_span<T, Memory> span() noexcept { return {data(), static_cast<std::size_t>(size())}; }
  memory_span<T const, Memory> span() const noexcept { return {data(), static_cast<std::size_t>(size())}; }

  T* data() noexcept { return static_cast<T*>(memory_.data()); }
  T const* data() const noexcept { return static_cast<T const*>(memory_.data()); }
  index_t size() const noexcept { return memory_.bytes() / static_cast<index_t>(sizeof(T)); }
  tessera::extents<Rank> const& extents() const noexcept { return extents_; }
  index_t extent(int d) const noexcept { return extents_[static_cast<std::size_t>(d)]; }

  template <std::convertible_to<index_t>... Index>
    requires(sizeof...(Index) == Rank && Memory::host_accessible)
  T& operator()(Index... index) noexcept { return view()(index...); }
  template <std::convertible_to<index_t>... Index>
    requires(sizeof...(Index) == Rank && Memory::host_accessible)
  T const& operator()(Index... index) const noexcept { return view()(index...); }

private:
  static index_t bytes_of(tessera::extents<Rank> const& sizes, site where) {
    auto const count = element_count(sizes, where);
    if (count > std::numeric_limits<index_t>::max() / static_cast<index_t>(sizeof(T)))
      throw size_error("E-core-002", where, "extents ", text_of(sizes), " need more than 2^63 - 1 bytes");
    return count * static_cast<index_t>(sizeof(T));
  }

  tessera::extents<Rank> extents_{};
  buffer<Memory> memory_;
};

} // namespace tessera::inline TESSERA_ABI

#endif
