// The emulation's stand-in for CUDA's header of this name: what kernel source and its launch need, in plain
// C++.
#ifndef TESSERA_CUDA_EMULATION_RUNTIME_H
#define TESSERA_CUDA_EMULATION_RUNTIME_H

#include <bit>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <tuple>
#include <type_traits>
#include <utility>

#include <cuda_runtime_api.h>

#define __host__
#define __device__
#define __global__
#define __forceinline__ inline
#define __launch_bounds__(...)
#define __maxnreg__(...)
#define __grid_constant__
#define __align__(n) alignas(n)
// One block runs on one thread of the operating system, so what belongs to the block may belong to the
// thread. The runtime knows the addresses by the program's thread-local segment.
#define __shared__ static thread_local
#define __constant__

// ---- vector types

#define TESSERA_EMULATED_VECTORS(T, name, align2, align4)                                                    \
  struct name##1 {                                                                                           \
    T x;                                                                                                     \
  };                                                                                                         \
  struct alignas(align2) name##2 {                                                                           \
    T x, y;                                                                                                  \
  };                                                                                                         \
  struct name##3 {                                                                                           \
    T x, y, z;                                                                                               \
  };                                                                                                         \
  struct alignas(align4) name##4 {                                                                           \
    T x, y, z, w;                                                                                            \
  };                                                                                                         \
  constexpr name##1 make_##name##1(T x) {                                                                    \
    return {x};                                                                                              \
  }                                                                                                          \
  constexpr name##2 make_##name##2(T x, T y) {                                                               \
    return {x, y};                                                                                           \
  }                                                                                                          \
  constexpr name##3 make_##name##3(T x, T y, T z) {                                                          \
    return {x, y, z};                                                                                        \
  }                                                                                                          \
  constexpr name##4 make_##name##4(T x, T y, T z, T w) {                                                     \
    return {x, y, z, w};                                                                                     \
  }
TESSERA_EMULATED_VECTORS(signed char, char, 2, 4)
TESSERA_EMULATED_VECTORS(unsigned char, uchar, 2, 4)
TESSERA_EMULATED_VECTORS(short, short, 4, 8)
TESSERA_EMULATED_VECTORS(unsigned short, ushort, 4, 8)
TESSERA_EMULATED_VECTORS(int, int, 8, 16)
TESSERA_EMULATED_VECTORS(unsigned, uint, 8, 16)
TESSERA_EMULATED_VECTORS(long long, longlong, 16, 16)
TESSERA_EMULATED_VECTORS(unsigned long long, ulonglong, 16, 16)
TESSERA_EMULATED_VECTORS(float, float, 8, 16)
TESSERA_EMULATED_VECTORS(double, double, 16, 16)
#undef TESSERA_EMULATED_VECTORS

struct dim3 {
  unsigned x, y, z;
  constexpr dim3(unsigned x_ = 1, unsigned y_ = 1, unsigned z_ = 1) : x(x_), y(y_), z(z_) {}
  constexpr dim3(uint3 v) : x(v.x), y(v.y), z(v.z) {}
  constexpr operator uint3() const { return {x, y, z}; }
};

#include <cuda_emulation/device.hpp>

// ---- launch

enum cudaLaunchAttributeID {
  cudaLaunchAttributeIgnore = 0,
  cudaLaunchAttributeCooperative = 2,
  cudaLaunchAttributeClusterDimension = 4,
  cudaLaunchAttributeProgrammaticStreamSerialization = 6,
  cudaLaunchAttributePriority = 8,
};
union cudaLaunchAttributeValue {
  char pad[64];
  int cooperative;
  struct {
    unsigned x, y, z;
  } clusterDim;
  int programmaticStreamSerializationAllowed;
  int priority;
};
struct cudaLaunchAttribute {
  cudaLaunchAttributeID id;
  cudaLaunchAttributeValue val;
};
struct cudaLaunchConfig_t {
  dim3 gridDim, blockDim;
  std::size_t dynamicSmemBytes;
  cudaStream_t stream;
  cudaLaunchAttribute* attrs;
  unsigned numAttrs;
};

namespace cuda_emulation {

/// A kernel with its arguments, which stand in the same object: while it runs they are its parameters.
struct launched {
  void const* kernel = nullptr;
  void (*run)(launched const&) = nullptr; // one thread
  void (*destroy)(launched*) = nullptr;
  std::size_t bytes = 0; // of the whole object
};

template <class... Parameters>
struct launched_with : launched {
  void (*function)(Parameters...);
  std::tuple<Parameters...> parameters;

  template <class... Arguments>
  explicit launched_with(void (*f)(Parameters...), Arguments&&... arguments)
      : function(f), parameters(static_cast<Arguments&&>(arguments)...) {
    kernel = reinterpret_cast<void const*>(f);
    bytes = sizeof(*this);
    run = [](launched const& self) {
      auto const& me = static_cast<launched_with const&>(self);
      std::apply(me.function, me.parameters);
    };
    destroy = [](launched* self) { delete static_cast<launched_with*>(self); };
  }
};

/// Takes over `kernel`.
cudaError_t launch(cudaLaunchConfig_t const& configuration, launched* kernel);

} // namespace cuda_emulation

template <class... Parameters, class... Arguments>
inline cudaError_t cudaLaunchKernelEx(cudaLaunchConfig_t const* configuration, void (*kernel)(Parameters...),
                                      Arguments&&... arguments) {
  static_assert(sizeof...(Parameters) == sizeof...(Arguments));
  static_assert((std::is_trivially_copyable_v<Parameters> && ...), "parameters are copied byte by byte");
  return cuda_emulation::launch(*configuration, new cuda_emulation::launched_with<Parameters...>(
                                                    kernel, static_cast<Arguments&&>(arguments)...));
}

#endif
