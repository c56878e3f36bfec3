/// What kernels use that is no plain C++: dynamic shared memory and 16-byte accesses. The emulation of CUDA
/// that the tests run kernels under (tests/cuda_emulation/) has this header once more, in plain C++.
#ifndef TESSERA_EXEC_DEVICE_CUH
#define TESSERA_EXEC_DEVICE_CUH

#include <cuda_runtime.h>

#include <tessera/core/extents.hpp>
#include <tessera/core/scalar.hpp>

namespace tessera::inline TESSERA_ABI::exec {

/// The block's dynamic shared memory, whose size is given at the launch. Every call gives the same memory,
/// aligned to 128 bytes.
template <class T>
inline __device__ T* dynamic_shared() {
  extern __shared__ __align__(128) unsigned char tessera_dynamic_shared[];
  return reinterpret_cast<T*>(tessera_dynamic_shared);
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
inline __device__ vector16<T> load16(T const* from) {
  return std::bit_cast<vector16<T>>(*reinterpret_cast<uint4 const*>(from));
}
template <class T>
__device__ inline void store16(T* to, vector16<T> const& value) {
  *reinterpret_cast<uint4*>(to) = std::bit_cast<uint4>(value);
}

} // namespace tessera::inline TESSERA_ABI::exec

#endif
