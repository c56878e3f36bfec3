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

#include <bit>

#include <tessera/core/extents.hpp>
#include <tessera/core/scalar.hpp>
#include <tessera/exec/device.cuh>

namespace tessera::inline TESSERA_ABI::exec {

/// So many elements that one access moves 16 bytes of the narrowest of these types, and whole accesses the
/// others.
template <storage_scalar... T>
inline constexpr int pack_size = 16 / static_cast<int>((std::min)({sizeof(T)...}));

/// True where 16 divides the address.
template <class T>
TESSERA_HOST_DEVICE inline bool is_aligned16(T const* at) noexcept {
  return reinterpret_cast<std::uintptr_t>(at) % 16 == 0;
}

namespace detail {
/// The 16 bytes of one access, as elements.
template <storage_scalar T>
struct pack_words {
  static constexpr int count = 16 / static_cast<int>(sizeof(T));
  T element[count];
};
} // namespace detail

/// values = the N elements from `from` on.
template <int N, storage_scalar T>
__device__ __forceinline__ void load_pack(float (&values)[N], T const* from) {
  if constexpr (N == 1) {
    values[0] = *from;
  } else {
    constexpr int step = detail::pack_words<T>::count;
    static_assert(N % step == 0);
#pragma unroll
    for (int i = 0; i < N; i += step) {
      auto const words = std::bit_cast<detail::pack_words<T>>(load16(from + i));
#pragma unroll
      for (int j = 0; j < step; ++j) values[i + j] = words.element[j];
    }
  }
}

/// The N elements from `to` on = values, rounded.
template <int N, storage_scalar T>
__device__ __forceinline__ void store_pack(T* to, float const (&values)[N]) {
  if constexpr (N == 1) {
    *to = T(values[0]);
  } else {
    constexpr int step = detail::pack_words<T>::count;
    static_assert(N % step == 0);
#pragma unroll
    for (int i = 0; i < N; i += step) {
      detail::pack_words<T> words;
#pragma unroll
      for (int j = 0; j < step; ++j) words.element[j] = T(values[i + j]);
      store16(to + i, std::bit_cast<vector16>(words));
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
