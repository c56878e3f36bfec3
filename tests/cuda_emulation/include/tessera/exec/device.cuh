/// The emulation's version of include/tessera/exec/device.cuh: the same declarations in plain C++.
#ifndef TESSERA_EXEC_DEVICE_CUH
#define TESSERA_EXEC_DEVICE_CUH

#include <cuda_runtime.h>

#include <bit>

#include <tessera/core/extents.hpp>
#include <tessera/core/scalar.hpp>

namespace tessera::inline TESSERA_ABI::exec {

namespace detail {
// Sixteen bytes that the compiler moves, and shows to the checks, in one access.
using emulated16 = unsigned __attribute__((vector_size(16), may_alias));
} // namespace detail

/// The block's dynamic shared memory, whose size is given at the launch. Every call gives the same memory,
/// aligned to 128 bytes.
template <class T>
inline T* dynamic_shared() {
  return static_cast<T*>(cuda_emulation::dynamic_shared_memory());
}

/// Sixteen bytes of elements, as one access moves them.
template <class T>
  requires(16 % sizeof(T) == 0)
struct alignas(16) vector16 {
  static constexpr int count = 16 / sizeof(T);
  T values[count];

  TESSERA_HOST_DEVICE T& operator[](int i) noexcept { return values[i]; }
  TESSERA_HOST_DEVICE T const& operator[](int i) const noexcept { return values[i]; }
};

/// `from` is aligned to 16 bytes, in global or shared memory.
template <class T>
inline vector16<T> load16(T const* from) {
  cuda_emulation::require_aligned(from, 16);
  return std::bit_cast<vector16<T>>(*reinterpret_cast<detail::emulated16 const*>(from));
}
template <class T>
inline void store16(T* to, vector16<T> const& value) {
  cuda_emulation::require_aligned(to, 16);
  *reinterpret_cast<detail::emulated16*>(to) = std::bit_cast<detail::emulated16>(value);
}

} // namespace tessera::inline TESSERA_ABI::exec

#include <cuda_emulation/tensor_cores.hpp>

#endif
