/// Memory of a CUDA device, from the device's stream-ordered pool, and pinned memory of the host, which a
/// device copies from and to without the processor.
///
///     tensor<bf16, 2, exec::cuda_memory> x({rows, columns});       // on the calling thread's current device
///     tensor<float, 1, exec::pinned_memory> loss({1});
///
/// Exists under TESSERA_WITH_CUDA.
#ifndef TESSERA_EXEC_CUDA_MEMORY_HPP
#define TESSERA_EXEC_CUDA_MEMORY_HPP

#if defined(TESSERA_WITH_CUDA)

#include <tessera/core/memory.hpp>
#include <tessera/exec/detail/cuda_api.hpp>

namespace tessera::inline TESSERA_ABI {

namespace exec {

struct cuda_memory {
  static constexpr bool host_accessible = false;
  static constexpr char const* name = "CUDA";
};

struct pinned_memory {
  static constexpr bool host_accessible = true;
  static constexpr char const* name = "pinned";
};

namespace detail {

/// Makes `device` the calling thread's current one, and the former one again at the end of the scope.
class device_scope {
public:
  explicit device_scope(int device, site where = site::here()) {
    cuda_check(cudaGetDevice(&former_), "cudaGetDevice", where);
    changed_ = former_ != device;
    if (changed_) cuda_check(cudaSetDevice(device), "cudaSetDevice", where);
  }
  ~device_scope() {
    if (changed_) cuda_let_pass(cudaSetDevice(former_));
  }
  device_scope(device_scope const&) = delete;
  device_scope& operator=(device_scope const&) = delete;

private:
  int former_ = 0;
  bool changed_ = false;
};

/// nullptr where there is too little memory; other errors throw.
inline bool allocated(cudaError_t status, char const* call, site where) {
  if (status == cudaErrorMemoryAllocation) {
    (void)cudaGetLastError();
    return false;
  }
  cuda_check(status, call, where);
  return true;
}

} // namespace detail
} // namespace exec

/// Memory is taken and given back rarely (tensors, arenas and scratch live long), so both calls wait: memory
/// is ready for every stream when `allocate` returns, and nothing uses it any more when it goes back. Neither
/// can be part of a CUDA graph.
template <>
struct memory_traits<exec::cuda_memory> {
  static void* allocate(std::size_t bytes, site where = site::here()) {
    void* memory = nullptr;
    if (!exec::detail::allocated(cudaMallocAsync(&memory, bytes, nullptr), "cudaMallocAsync", where))
      return nullptr;
    exec::cuda_check(cudaStreamSynchronize(nullptr), "cudaStreamSynchronize", where);
    return memory;
  }
  /// On the device it came from, whichever is current. Memory that something may still use, since waiting for
  /// the device failed, is not given back: at the end of a program the device may be gone.
  static void deallocate(void* memory, std::size_t) noexcept {
    cudaPointerAttributes from{};
    int current = 0;
    auto status = cudaPointerGetAttributes(&from, memory);
    if (status == cudaSuccess) status = cudaGetDevice(&current);
    if (status != cudaSuccess) return exec::cuda_let_pass(status);
    if (from.device != current) exec::cuda_let_pass(cudaSetDevice(from.device));
    status = cudaDeviceSynchronize();
    exec::cuda_let_pass(status);
    if (status == cudaSuccess) exec::cuda_let_pass(cudaFreeAsync(memory, nullptr));
    if (from.device != current) exec::cuda_let_pass(cudaSetDevice(current));
  }
  static void zero(void* memory, std::size_t bytes, site where = site::here()) {
    exec::cuda_check(cudaMemsetAsync(memory, 0, bytes, nullptr), "cudaMemsetAsync", where);
    exec::cuda_check(cudaStreamSynchronize(nullptr), "cudaStreamSynchronize", where);
  }
};

template <>
struct memory_traits<exec::pinned_memory> {
  static void* allocate(std::size_t bytes, site where = site::here()) {
    void* memory = nullptr;
    return exec::detail::allocated(cudaHostAlloc(&memory, bytes, cudaHostAllocPortable), "cudaHostAlloc",
                                   where)
               ? memory
               : nullptr;
  }
  static void deallocate(void* memory, std::size_t) noexcept { exec::cuda_let_pass(cudaFreeHost(memory)); }
  static void zero(void* memory, std::size_t bytes) noexcept { std::memset(memory, 0, bytes); }
};

} // namespace tessera::inline TESSERA_ABI

#endif

#endif
