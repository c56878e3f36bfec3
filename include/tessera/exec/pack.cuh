/// A few neighbouring elements of an array, in registers, as float: what one thread moves at a time. On an
/// address that 16 divides a pack moves in accesses of 16 bytes.
///
///     constexpr int n = exec::pack_size<T>;
///     float x[n];
///     exec::load_pack(x, in + i);          // in + i aligned, or n == 1
///     exec::store_pack(out + i, x);
///     exec::load_part(x, in + i, count, aligned);   // anywhere, and fewer than n at an end
#ifndef TESSERA_EXEC_PACK_CUH
#define TESSERA_EXEC_PACK_CUH

#include <tessera/core/extents.hpp>
#include <tessera/core/scalar.hpp>
#include <tessera/exec/device.cuh>

namespace tessera::inline TESSERA_ABI::exec {

/// So many elements that one access moves 16 bytes of the narrowest of these types, and whole accesses the
/// others.
template <storage_scalar... T>
inline constexpr int pack_size = ((sizeof(T) == 2) || ...) ? 8 : 4;

/// values = the N elements from `from` on.
template <int N, storage_scalar T>
__device__ __forceinline__ void load_pack(float (&values)[N], T const* from) {
  if constexpr (N == 1) {
    values[0] = *from;
  } else {
    constexpr int step = vector16<T>::count;
    static_assert(N % step == 0);
#pragma unroll
    for (int i = 0; i < N; i += step) {
      auto const words = load16(from + i);
#pragma unroll
      for (int j = 0; j < step; ++j) values[i + j] = words[j];
    }
  }
}

/// The N elements from `to` on = values, rounded.
template <int N, storage_scalar T>
__device__ __forceinline__ void store_pack(T* to, float const (&values)[N]) {
  if constexpr (N == 1) {
    *to = T(values[0]);
  } else {
    constexpr int step = vector16<T>::count;
    static_assert(N % step == 0);
#pragma unroll
    for (int i = 0; i < N; i += step) {
      vector16<T> words;
#pragma unroll
      for (int j = 0; j < step; ++j) words[j] = T(values[i + j]);
      store16(to + i, words);
    }
  }
}

/// As load_pack, of `count` elements (the others become 0); element by element unless all N are wanted and
/// `aligned` says that `from` is.
template <int N, storage_scalar T>
__device__ __forceinline__ void load_part(float (&values)[N], T const* from, index_t count, bool aligned) {
  if (aligned && count >= N) {
    load_pack(values, from);
  } else {
#pragma unroll
    for (int i = 0; i < N; ++i) values[i] = i < count ? static_cast<float>(from[i]) : 0.0f;
  }
}

template <int N, storage_scalar T>
__device__ __forceinline__ void store_part(T* to, float const (&values)[N], index_t count, bool aligned) {
  if (aligned && count >= N) {
    store_pack(to, values);
  } else {
#pragma unroll
    for (int i = 0; i < N; ++i)
      if (i < count) to[i] = T(values[i]);
  }
}

} // namespace tessera::inline TESSERA_ABI::exec

#endif
