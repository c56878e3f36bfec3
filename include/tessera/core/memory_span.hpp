/// Kinds of memory, and a run of elements in one of them. In memory that the processor reaches, a
/// `memory_span` is a std::span; elsewhere it is a `device_span`, which knows its memory and gives no access
/// to elements. Spans of different memories do not convert into one another.
///
///     memory_span<float, typename Ex::memory> weights;      // what a template over a space writes
#ifndef TESSERA_CORE_MEMORY_SPAN_HPP
#define TESSERA_CORE_MEMORY_SPAN_HPP

#include <concepts>
#include <span>
#include <type_traits>

#include <tessera/core/abi.hpp>

namespace tessera::inline TESSERA_ABI {

/// Memory that the processor reads and writes directly.
struct host_memory {
  static constexpr bool host_accessible = true;
  static constexpr char const* name = "host";
};

/// A kind of memory: host_memory here; the CUDA headers add theirs.
template <class M>
concept memory_space = requires {
  { M::host_accessible } -> std::convertible_to<bool>;
  { M::name } -> std::convertible_to<char const*>;
};

/// Adjacent elements in memory that the processor does not reach. Borrowed, trivially copyable.
template <class T, memory_space Memory>
class device_span {
public:
  using element_type = T;
  using value_type = std::remove_cv_t<T>;
  using size_type = std::size_t;
  using memory = Memory;

  constexpr device_span() = default;
  TESSERA_HOST_DEVICE constexpr device_span(T* data, std::size_t size) noexcept : data_(data), size_(size) {}
  /// Constant elements from mutable ones.
  template <class U>
    requires(std::is_const_v<T>&& std::same_as<U, std::remove_const_t<T>>)
  TESSERA_HOST_DEVICE constexpr device_span(device_span<U, Memory> other) noexcept // NOLINT: implicit
      : device_span(other.data(), other.size()) {}

  TESSERA_HOST_DEVICE constexpr T* data() const noexcept { return data_; }
  TESSERA_HOST_DEVICE constexpr std::size_t size() const noexcept { return size_; }
  TESSERA_HOST_DEVICE constexpr std::size_t size_bytes() const noexcept { return size_ * sizeof(T); }
  TESSERA_HOST_DEVICE constexpr bool empty() const noexcept { return size_ == 0; }

  /// As std::span's: the ranges must lie inside.
  TESSERA_HOST_DEVICE constexpr device_span first(std::size_t count) const noexcept { return {data_, count}; }
  TESSERA_HOST_DEVICE constexpr device_span last(std::size_t count) const noexcept {
    return {data_ + (size_ - count), count};
  }
  TESSERA_HOST_DEVICE constexpr device_span subspan(std::size_t offset,
                                                    std::size_t count = std::dynamic_extent) const noexcept {
    return {data_ + offset, count == std::dynamic_extent ? size_ - offset : count};
  }

private:
  T* data_ = nullptr;
  std::size_t size_ = 0;
};

namespace detail {
template <class T, memory_space Memory, bool HostAccessible>
struct span_in_memory {
  using type = std::span<T>;
};
template <class T, memory_space Memory>
struct span_in_memory<T, Memory, false> {
  using type = device_span<T, Memory>;
};
} // namespace detail

/// Adjacent elements of type T in memory of the given kind.
template <class T, memory_space Memory>
using memory_span = typename detail::span_in_memory<T, Memory, Memory::host_accessible>::type;

/// `Span` is `memory_span<X, Memory>` for some X: for templates that deduce X (an alias cannot be deduced
/// through).
template <class Span, class Memory>
concept span_in =
    memory_space<Memory> && std::same_as<Span, memory_span<typename Span::element_type, Memory>>;

} // namespace tessera::inline TESSERA_ABI

#endif
