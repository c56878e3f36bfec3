/// Copies from and to CUDA memory (exec/copy.hpp says what copies are). All are ordered on the space's
/// stream. One whose other side is ordinary host memory has finished when it returns; between device memory,
/// and from or to pinned memory (given as views, which carry it in their type), it goes on in the background.
///
/// Exists under TESSERA_WITH_CUDA.
#ifndef TESSERA_EXEC_COPY_CUDA_HPP
#define TESSERA_EXEC_COPY_CUDA_HPP

#if defined(TESSERA_WITH_CUDA)

#include <tessera/exec/copy.hpp>
#include <tessera/exec/cuda.hpp>
#include <tessera/exec/event.hpp>

namespace tessera::inline TESSERA_ABI::exec {

namespace detail {

/// Starts a copy; waits where `wait`.
template <cuda_space Ex>
void copy_bytes(Ex& ex, void* to, void const* from, std::size_t bytes, bool wait, site where) {
  if (bytes == 0) return;
  cuda_check(cudaMemcpyAsync(to, from, bytes, cudaMemcpyDefault, ex.stream()), "cudaMemcpyAsync", where);
  // The runtime promises less than this for pageable memory, and how much less depends on the machine.
  if (wait) ex.synchronize(where);
}

} // namespace detail

/// Host to device, device to host, device to device.
template <cuda_space Ex, class T>
  requires std::is_trivially_copyable_v<T>
void copy(Ex& ex, device_span<T, cuda_memory> to, std::type_identity_t<std::span<T const>> from,
          site where = site::here()) {
  detail::require_same_count(to.size(), from.size(), where);
  detail::copy_bytes(ex, to.data(), from.data(), from.size_bytes(), true, where);
}
template <cuda_space Ex, class T>
  requires std::is_trivially_copyable_v<T>
void copy(Ex& ex, std::span<T> to, std::type_identity_t<device_span<T const, cuda_memory>> from,
          site where = site::here()) {
  detail::require_same_count(to.size(), from.size(), where);
  detail::copy_bytes(ex, to.data(), from.data(), from.size_bytes(), true, where);
}
template <cuda_space Ex, class T>
  requires std::is_trivially_copyable_v<T>
void copy(Ex& ex, device_span<T, cuda_memory> to,
          std::type_identity_t<device_span<T const, cuda_memory>> from, site where = site::here()) {
  detail::require_same_count(to.size(), from.size(), where);
  detail::copy_bytes(ex, to.data(), from.data(), from.size_bytes(), false, where);
}

/// Views without gaps, of any two memories of which one is the device's.
template <cuda_space Ex, class T, class U, int Rank, memory_space To, memory_space From>
  requires((std::same_as<To, cuda_memory> ||
            std::same_as<From, cuda_memory>)&&std::same_as<T, std::remove_const_t<U>>)
void copy(Ex& ex, view<T, Rank, To> to, view<U, Rank, From> from, site where = site::here()) {
  auto const source = from.span(where);
  auto const target = to.span(where);
  detail::require_same_count(target.size(), source.size(), where);
  detail::copy_bytes(ex, target.data(), source.data(), source.size_bytes(),
                     std::same_as<To, host_memory> || std::same_as<From, host_memory>, where);
}

/// Rows of a matrix in device memory into those of another.
template <cuda_space Ex, class T, class U>
  requires std::same_as<T, std::remove_const_t<U>>
void copy_rows(Ex& ex, view<T, 2, cuda_memory> to, view<U, 2, cuda_memory> from, site where = site::here()) {
  detail::require_rows(to, from, where);
  if (to.empty()) return;
  auto const bytes_of = [](index_t elements) { return static_cast<std::size_t>(elements) * sizeof(T); };
  // A single row has no pitch, and CUDA wants one that is not less than the row.
  auto const one = to.extent(0) == 1;
  cuda_check(cudaMemcpy2DAsync(to.data(), bytes_of(one ? to.extent(1) : to.stride(0)), from.data(),
                               bytes_of(one ? to.extent(1) : from.stride(0)), bytes_of(to.extent(1)),
                               static_cast<std::size_t>(to.extent(0)), cudaMemcpyDeviceToDevice, ex.stream()),
             "cudaMemcpy2DAsync", where);
}

template <cuda_space Ex, class T>
  requires std::is_trivially_copyable_v<T>
void zero(Ex& ex, device_span<T, cuda_memory> data, site where = site::here()) {
  if (data.empty()) return;
  cuda_check(cudaMemsetAsync(data.data(), 0, data.size_bytes(), ex.stream()), "cudaMemsetAsync", where);
}

/// Pinned memory on the host's side: `upload` returns at once, and `host` waits for it before the content may
/// be replaced. An upload that is captured into a graph copies anew at each launch; whoever launches sees to
/// it that the host's side is not written meanwhile.
template <class T, int Rank, cuda_space Ex>
class staged<T, Rank, Ex> {
public:
  staged() = default;
  explicit staged(Ex& ex, tessera::extents<Rank> const& sizes, memory_account account = {},
                  site where = site::here())
      : host_(sizes, account, where), device_(sizes, account, where), uploaded_(ex, {}, where) {}

  view<T, Rank> host(site where = site::here()) {
    if (uploading_) uploaded_.wait(where);
    uploading_ = false;
    return {host_.data(), host_.extents()};
  }
  view<T, Rank, typename Ex::memory> device() { return device_.view(); }

  view<T, Rank, typename Ex::memory> upload(Ex& ex, site where = site::here()) {
    copy(ex, device_.view(), host_.view(), where);
    if (host_.size() > 0 && !ex.capturing(where)) {
      uploaded_.record(ex, where);
      uploading_ = true;
    }
    return device_.view();
  }
  view<T, Rank> download(Ex& ex, site where = site::here()) {
    copy(ex, host_.view(), device_.view(), where);
    ex.synchronize(where);
    uploading_ = false;
    return {host_.data(), host_.extents()};
  }

  tessera::extents<Rank> const& extents() const noexcept { return device_.extents(); }

private:
  tensor<T, Rank, pinned_memory> host_;
  tensor<T, Rank, typename Ex::memory> device_;
  event uploaded_;
  bool uploading_ = false;
};

} // namespace tessera::inline TESSERA_ABI::exec

#endif

#endif
