/// What kernels use that is no plain C++: dynamic shared memory, 16-byte accesses, the tensor cores and
/// asynchronous copies. The emulation of CUDA that the tests run kernels under (tests/cuda_emulation/) has
/// this header once more, in plain C++.
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

// ---- 16-bit pairs, tensor cores, asynchronous copies -----------------------------------------------------

/// bf16 or fp16: what the tensor cores multiply with fp32 sums.
template <class T>
concept tensor_core_scalar = std::same_as<T, bf16> || std::same_as<T, fp16>;

/// 2^x, within about two units in the last place; results below 2^-126 are 0.
__device__ __forceinline__ float exp2_approximate(float x) {
  float result;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(result) : "f"(x));
  return result;
}

/// Two floats, rounded to nearest even, `low` in the lower half.
template <tensor_core_scalar T>
__device__ __forceinline__ std::uint32_t pack_pair(float low, float high) {
  std::uint32_t pair;
  if constexpr (std::same_as<T, bf16>)
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(high), "f"(low));
  else
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(high), "f"(low));
  return pair;
}

/// d += a b by all lanes of a warp: a is 16 x 16, b is 16 x 8, d is 16 x 8. With g = lane / 4, t = lane % 4,
/// a register of two elements holds them in order of columns (a) or rows (b), the first in the lower half:
///   a[0]: row g,     columns 2t, 2t + 1      a[1]: row g + 8, columns 2t, 2t + 1
///   a[2]: row g,     columns 2t + 8, 2t + 9  a[3]: row g + 8, columns 2t + 8, 2t + 9
///   b0:   column g,  rows 2t, 2t + 1         b1:   column g,  rows 2t + 8, 2t + 9
///   d[0], d[1]: row g, columns 2t, 2t + 1    d[2], d[3]: row g + 8, columns 2t, 2t + 1
template <tensor_core_scalar T>
__device__ __forceinline__ void mma_16x8x16(float (&d)[4], std::uint32_t const (&a)[4], std::uint32_t b0,
                                            std::uint32_t b1) {
  if constexpr (std::same_as<T, bf16>)
    asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, "
                 "{%8, %9}, {%0, %1, %2, %3};"
                 : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
  else
    asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, "
                 "{%8, %9}, {%0, %1, %2, %3};"
                 : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

/// Reads four 8 x 8 matrices of 16-bit elements from shared memory, by all lanes of a warp: lane 8 i + r
/// gives the address of row r, 16 bytes, of matrix i. r[i] receives of matrix i the elements of row lane / 4
/// in columns 2 (lane % 4) and one more; transposed, those of column lane / 4 in rows 2 (lane % 4) and one
/// more.
__device__ __forceinline__ void load_matrix_x4(std::uint32_t (&r)[4], void const* row) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
               : "r"(static_cast<std::uint32_t>(__cvta_generic_to_shared(row))));
}
__device__ __forceinline__ void load_matrix_x4_transposed(std::uint32_t (&r)[4], void const* row) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
               : "r"(static_cast<std::uint32_t>(__cvta_generic_to_shared(row))));
}

/// Starts to copy 16 (4) bytes from global to shared memory, or zeros where not `inside`; then nothing is
/// read. Both aligned to the size. `copy_async_commit` closes a group of the copies that this thread started;
/// `copy_async_wait<N>` waits until all but its last N groups are there. Other threads see them after the
/// next barrier.
__device__ __forceinline__ void copy_async16(void* shared, void const* global, bool inside = true) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(
                   static_cast<std::uint32_t>(__cvta_generic_to_shared(shared))),
               "l"(__cvta_generic_to_global(global)), "r"(inside ? 16 : 0)
               : "memory");
}
__device__ __forceinline__ void copy_async4(void* shared, void const* global, bool inside = true) {
  asm volatile("cp.async.ca.shared.global [%0], [%1], 4, %2;" ::"r"(
                   static_cast<std::uint32_t>(__cvta_generic_to_shared(shared))),
               "l"(__cvta_generic_to_global(global)), "r"(inside ? 4 : 0)
               : "memory");
}
__device__ __forceinline__ void copy_async_commit() {
  asm volatile("cp.async.commit_group;" ::: "memory");
}
template <int N>
__device__ __forceinline__ void copy_async_wait() {
  asm volatile("cp.async.wait_group %0;" ::"n"(N) : "memory");
}

} // namespace tessera::inline TESSERA_ABI::exec

#endif
