/// comm::nccl with the kernel that adds in rank_order. A program that reduces in rank_order over NCCL
/// includes this file in a file that nvcc compiles, for the types that it reduces there.
///
/// Cost of the kernel: each piece and the output once through memory, 16 bytes at a time where all of them
/// are aligned.
#ifndef TESSERA_COMM_CUDA_NCCL_CUH
#define TESSERA_COMM_CUDA_NCCL_CUH

#if defined(TESSERA_WITH_NCCL)

#include <tessera/comm/nccl.hpp>
#include <tessera/exec/launch.cuh>

namespace tessera::inline TESSERA_ABI::comm::detail {

inline constexpr int combine_threads = 256;

/// out[i] = reduction over r of pieces[r * stride + i], `Width` elements a thread: as `combine` on the host.
template <class T, reduction Operation, int Width>
__launch_bounds__(combine_threads) TESSERA_KERNEL
    void combine_pieces(T* out, T const* pieces, index_t n, index_t stride, int ranks, int* overflow) {
  using wide = accumulator_t<T>;
  auto const begin =
      (static_cast<index_t>(blockIdx.x) * combine_threads + static_cast<index_t>(threadIdx.x)) * Width;
  if (begin >= n) return;
  bool exact = true;
  if constexpr (Width > 1) {
    if (begin + Width <= n) {
      wide sum[Width];
      auto part = exec::load16(pieces + begin);
#pragma unroll
      for (int i = 0; i < Width; ++i) sum[i] = static_cast<wide>(part[i]);
      for (int r = 1; r < ranks; ++r) {
        part = exec::load16(pieces + r * stride + begin);
#pragma unroll
        for (int i = 0; i < Width; ++i) exact &= combine_value<Operation>(sum[i], static_cast<wide>(part[i]));
      }
#pragma unroll
      for (int i = 0; i < Width; ++i) part[i] = static_cast<T>(sum[i]);
      exec::store16(out + begin, part);
      if (!exact && overflow != nullptr) atomicMax(overflow, 1);
      return;
    }
  }
  auto const end = begin + Width < n ? begin + Width : n;
  for (auto i = begin; i < end; ++i) {
    auto sum = static_cast<wide>(pieces[i]);
    for (int r = 1; r < ranks; ++r)
      exact &= combine_value<Operation>(sum, static_cast<wide>(pieces[r * stride + i]));
    out[i] = static_cast<T>(sum);
  }
  if (!exact && overflow != nullptr) atomicMax(overflow, 1);
}

template <class T, reduction Operation>
void launch_combine(device_combine_space& space, combine_step const& s) {
  auto* out = static_cast<T*>(s.out);
  auto const* pieces = static_cast<T const*>(s.pieces);
  constexpr int width = 16 / sizeof(T);
  auto const shape = [&](index_t per_thread) {
    auto const per_block = combine_threads * per_thread;
    return exec::launch_shape{.grid = exec::grid_of((s.n + per_block - 1) / per_block, 1, 1, s.where),
                              .block = dim3(combine_threads),
                              .where = s.where};
  };
  if (exec::aligned16(pieces, s.stride) && exec::aligned16(out))
    exec::launch(space.lane, shape(width), &combine_pieces<T, Operation, width>, out, pieces, s.n, s.stride,
                 s.ranks, space.overflow);
  else
    exec::launch(space.lane, shape(1), &combine_pieces<T, Operation, 1>, out, pieces, s.n, s.stride, s.ranks,
                 space.overflow);
}

template <reducible_scalar T>
bool combine_on_device(void* where, combine_step const& step) {
  auto& space = *static_cast<device_combine_space*>(where);
  switch (step.operation) {
  case reduction::sum:
    launch_combine<T, reduction::sum>(space, step);
    break;
  case reduction::max:
    launch_combine<T, reduction::max>(space, step);
    break;
  case reduction::min:
    launch_combine<T, reduction::min>(space, step);
    break;
  }
  return true;
}

} // namespace tessera::inline TESSERA_ABI::comm::detail

#endif

#endif
