/// The tensor cores and asynchronous copies of exec/device.cuh, in plain C++; included by the emulation's
/// header of that name.
#ifndef TESSERA_CUDA_EMULATION_TENSOR_CORES_HPP
#define TESSERA_CUDA_EMULATION_TENSOR_CORES_HPP

#include <cuda_runtime.h>

#include <tessera/core/scalar.hpp>

namespace cuda_emulation {

/// The copy is made when the thread waits for it; until then the shared memory holds NaN. Not `inside`:
/// zeros.
void start_copy(void* shared, void const* global, std::size_t bytes, bool inside);
/// Closes a group of the copies that this thread started.
void commit_copies();
/// Makes all copies but those of the last `groups_left` groups, and those of no group yet.
void wait_for_copies(int groups_left);

} // namespace cuda_emulation

namespace tessera::inline TESSERA_ABI::exec {

template <class T>
concept tensor_core_scalar = std::same_as<T, bf16> || std::same_as<T, fp16>;

inline float exp2_approximate(float x) {
  auto const result = std::exp2(x);
  return result < 0x1p-126f ? 0.0f : result;
}

template <tensor_core_scalar T>
std::uint32_t pack_pair(float low, float high) {
  return std::uint32_t{T(low).bits} | std::uint32_t{T(high).bits} << 16;
}

namespace emulated {

/// Element 0 or 1 of a register.
template <tensor_core_scalar T>
__attribute__((no_sanitize("thread"))) float element(std::uint32_t pair, int which) {
  return T::from_bits(static_cast<std::uint16_t>(pair >> (16 * which)));
}

struct mma_slot {
  float* d;
  std::uint32_t const* a;
  std::uint32_t b[2];
};

/// Collects both matrices from the registers of all lanes. In the terms of the instruction set's description,
/// lane l is of group g = l / 4 and has number t = l % 4 in it; the elements of its registers, in order, are
///   a0 .. a7: row g for a0, a1, a4, a5, else g + 8; column 2 t + (i & 1), + 8 for i >= 4
///   b0 .. b3: row 2 t + (i & 1), + 8 for i >= 2; column g
///   c0 .. c3: row g for i < 2, else g + 8; column 2 t + (i & 1)
template <tensor_core_scalar T>
__attribute__((no_sanitize("thread"))) void act_mma(void* const* slots, unsigned) {
  float a[16][16], b[16][8];
  for (int lane = 0; lane < 32; ++lane) {
    auto const& slot = *static_cast<mma_slot const*>(slots[lane]);
    auto const g = lane / 4, t = lane % 4;
    for (int i = 0; i < 8; ++i)
      a[g + (i < 2 || (4 <= i && i < 6) ? 0 : 8)][2 * t + (i & 1) + (i >= 4 ? 8 : 0)] =
          element<T>(slot.a[i / 2], i & 1);
    for (int i = 0; i < 4; ++i) b[2 * t + (i & 1) + (i >= 2 ? 8 : 0)][g] = element<T>(slot.b[i / 2], i & 1);
  }
  for (int lane = 0; lane < 32; ++lane) {
    auto const& slot = *static_cast<mma_slot const*>(slots[lane]);
    auto const g = lane / 4, t = lane % 4;
    for (int i = 0; i < 4; ++i) {
      float sum = 0;
      for (int k = 0; k < 16; ++k) sum += a[g + (i < 2 ? 0 : 8)][k] * b[k][2 * t + (i & 1)];
      slot.d[i] += sum;
    }
  }
}

struct matrix_slot {
  void const* row;
  std::uint32_t* r;
};

/// Lane 8 i + j brought the address of row j of matrix i.
template <bool Transposed>
__attribute__((no_sanitize("thread"))) void act_load_matrix(void* const* slots, unsigned) {
  for (int lane = 0; lane < 32; ++lane)
    for (int i = 0; i < 4; ++i) {
      std::uint32_t pair = 0;
      for (int e = 0; e < 2; ++e) {
        auto const along = 2 * (lane % 4) + e, across = lane / 4;
        auto const row = Transposed ? along : across, column = Transposed ? across : along;
        auto const* at =
            static_cast<std::uint16_t const*>(static_cast<matrix_slot const*>(slots[8 * i + row])->row) +
            column;
        pair |= std::uint32_t{*at} << (16 * e);
      }
      static_cast<matrix_slot const*>(slots[lane])->r[i] = pair;
    }
}

template <bool Transposed>
void load_matrix(std::uint32_t (&r)[4], void const* row, cuda_emulation::place where) {
  cuda_emulation::require_aligned(row, 16);
  cuda_emulation::read_access(row, 16);
  matrix_slot slot{row, r};
  cuda_emulation::meet(0xffffffffu, where, &slot, &act_load_matrix<Transposed>);
}

} // namespace emulated

template <tensor_core_scalar T>
void mma_16x8x16(float (&d)[4], std::uint32_t const (&a)[4], std::uint32_t b0, std::uint32_t b1,
                 cuda_emulation::place where = cuda_emulation::place::here()) {
  emulated::mma_slot slot{d, a, {b0, b1}};
  cuda_emulation::meet(0xffffffffu, where, &slot, &emulated::act_mma<T>);
}

inline void load_matrix_x4(std::uint32_t (&r)[4], void const* row,
                           cuda_emulation::place where = cuda_emulation::place::here()) {
  emulated::load_matrix<false>(r, row, where);
}
inline void load_matrix_x4_transposed(std::uint32_t (&r)[4], void const* row,
                                      cuda_emulation::place where = cuda_emulation::place::here()) {
  emulated::load_matrix<true>(r, row, where);
}

inline void copy_async16(void* shared, void const* global, bool inside = true) {
  cuda_emulation::start_copy(shared, global, 16, inside);
}
inline void copy_async4(void* shared, void const* global, bool inside = true) {
  cuda_emulation::start_copy(shared, global, 4, inside);
}
inline void copy_async_commit() {
  cuda_emulation::commit_copies();
}
template <int N>
void copy_async_wait() {
  cuda_emulation::wait_for_copies(N);
}

} // namespace tessera::inline TESSERA_ABI::exec

#endif
