/// Copies between memories, ordered with the operations of a space, and host-side arrays with a counterpart
/// in a space's memory. This header has the host's part and no CUDA header; exec/copy_cuda.hpp has the
/// device's.
///
///     exec::copy(ex, on_device.span(), std::span<float const>(values));   // every space: destination first
///     exec::zero(ex, gradients.span());
///     exec::staged<std::int32_t, 2, Ex> tokens(ex, {batch, length});
///     fill(tokens.host());
///     model.forward(ex, tokens.upload(ex));
#ifndef TESSERA_EXEC_COPY_HPP
#define TESSERA_EXEC_COPY_HPP

#include <cstring>

#include <tessera/core/tensor.hpp>
#include <tessera/exec/space.hpp>

namespace tessera::inline TESSERA_ABI::exec {

namespace detail {

/// Both sides of a copy hold the same number of elements.
inline void require_same_count(std::size_t to, std::size_t from, site where) {
  if (to != from)
    throw size_error("E-exec-105", where, "a copy of ", from, " elements into room for ", to,
                     "; both must be the same");
}

/// Both have the same rows, each without gaps.
template <class T, class U, memory_space Memory>
void require_rows(view<T, 2, Memory> to, view<U, 2, Memory> from, site where) {
  if (to.extents() != from.extents())
    throw size_error("E-exec-110", where, "a copy of rows ", text_of(from.extents()), " into ",
                     text_of(to.extents()), "; both must be the same");
  if (to.extent(1) > 1 && (to.stride(1) != 1 || from.stride(1) != 1))
    throw size_error("E-exec-111", where, "a copy of rows whose elements are ", from.stride(1),
                     " apart, into ", to.stride(1), "; both must be 1");
}

} // namespace detail

/// Copies all elements; the two do not overlap. Throws size_error where the counts differ (E-exec-105).
template <host_space Ex, class T>
  requires std::is_trivially_copyable_v<T>
void copy(Ex&, std::span<T> to, std::type_identity_t<std::span<T const>> from, site where = site::here()) {
  detail::require_same_count(to.size(), from.size(), where);
  if (!from.empty()) std::memcpy(to.data(), from.data(), from.size_bytes());
}

/// The same for views without gaps, of any host-accessible memory.
template <host_space Ex, class T, class U, int Rank, memory_space To, memory_space From>
  requires(To::host_accessible&& From::host_accessible&& std::same_as<T, std::remove_const_t<U>>)
void copy(Ex& ex, view<T, Rank, To> to, view<U, Rank, From> from, site where = site::here()) {
  copy(ex, to.span(where), std::span<T const>(from.span(where)), where);
}

/// The rows of one matrix into those of another, whatever stands between them in either. Rows are without
/// gaps. Throws size_error where extents differ (E-exec-110) or rows have gaps (E-exec-111).
template <host_space Ex, class T, class U, memory_space Memory>
  requires(Memory::host_accessible&& std::same_as<T, std::remove_const_t<U>>)
void copy_rows(Ex&, view<T, 2, Memory> to, view<U, 2, Memory> from, site where = site::here()) {
  detail::require_rows(to, from, where);
  auto const bytes = static_cast<std::size_t>(to.extent(1)) * sizeof(T);
  if (bytes == 0) return;
  for (index_t row = 0; row < to.extent(0); ++row)
    std::memcpy(to.address(row, 0), from.address(row, 0), bytes);
}

/// Sets all elements to zero.
template <host_space Ex, class T>
  requires std::is_trivially_copyable_v<T>
void zero(Ex&, std::span<T> data, site = site::here()) {
  if (!data.empty()) std::memset(static_cast<void*>(data.data()), 0, data.size_bytes());
}

/// An array that the host fills or reads and the space's operations read or write.
template <class T, int Rank, space Ex>
class staged;

/// On the host both sides are one: `upload` and `download` cost nothing.
template <class T, int Rank, host_space Ex>
class staged<T, Rank, Ex> {
public:
  staged() = default;
  explicit staged(Ex&, tessera::extents<Rank> const& sizes, memory_account account = {},
                  site where = site::here())
      : memory_(sizes, account, where) {}

  /// The host's side, to be filled or read.
  view<T, Rank> host(site = site::here()) { return memory_.view(); }
  /// The space's side, not (yet) the same content.
  view<T, Rank, typename Ex::memory> device() { return memory_.view(); }
  /// Brings the host's content to the space, in order with its operations.
  view<T, Rank, typename Ex::memory> upload(Ex&, site = site::here()) { return memory_.view(); }
  /// Brings the space's content to the host, and waits for it.
  view<T, Rank> download(Ex&, site = site::here()) { return memory_.view(); }

  tessera::extents<Rank> const& extents() const noexcept { return memory_.extents(); }

private:
  tensor<T, Rank> memory_;
};

} // namespace tessera::inline TESSERA_ABI::exec

#endif
