/// comm::nccl with the kernels that add in rank_order and as a binary_tree. A program that reduces in those
/// orders over NCCL includes this file in a file that nvcc compiles, for the types that it reduces there.
///
/// Cost of a kernel: each piece and the output once through memory, 16 bytes at a time where all of them
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

/// Levels of trees that a thread keeps in registers: six where it adds 16 bytes at a time, and for single
/// elements as many as any number of ranks needs.
constexpr int tree_levels(int width) noexcept {
  return width > 1 ? 6 : 31;
}

/// The tree over `ranks` summands that `read(r)` brings, `Width` values at a time, in registers: branch[l]
/// waits with the sum of 2^l ranks until the next 2^l are there. What waits at the end is added from the
/// right, as summation::binary_tree says. ranks < 2^Levels.
template <int Levels, class Value, class Read>
__device__ Value tree_of(int ranks, Read read) {
  Value branch[Levels];
  for (int r = 0; r < ranks; ++r) {
    Value carry = read(r);
    bool up = true;
#pragma unroll
    for (int level = 0; level < Levels; ++level) {
      if (!up) continue;
      if ((r >> level & 1) != 0) {
        carry = branch[level] + carry;
      } else {
        branch[level] = carry;
        up = false;
      }
    }
  }
  Value sum{};
  bool first = true;
#pragma unroll
  for (int level = 0; level < Levels; ++level) {
    if ((ranks >> level & 1) == 0) continue;
    sum = first ? branch[level] : branch[level] + sum;
    first = false;
  }
  return sum;
}

/// Values that are added one by one.
template <class A, int Width>
struct summands {
  A at[Width];

  friend __device__ summands operator+(summands const& a, summands const& b) {
    summands sum;
#pragma unroll
    for (int i = 0; i < Width; ++i) sum.at[i] = a.at[i] + b.at[i];
    return sum;
  }
};

/// out[i] = the binary tree over r of pieces[r * stride + i], `Width` elements a thread.
template <class T, int Width>
__launch_bounds__(combine_threads) TESSERA_KERNEL
    void add_pieces_as_tree(T* out, T const* pieces, index_t n, index_t stride, int ranks) {
  using wide = accumulator_t<T>;
  auto const begin =
      (static_cast<index_t>(blockIdx.x) * combine_threads + static_cast<index_t>(threadIdx.x)) * Width;
  if (begin >= n) return;
  if constexpr (Width > 1) {
    if (begin + Width <= n) {
      using group = summands<wide, Width>;
      auto const sum = tree_of<tree_levels(Width), group>(ranks, [&](int r) {
        auto const part = exec::load16(pieces + r * stride + begin);
        group values;
#pragma unroll
        for (int i = 0; i < Width; ++i) values.at[i] = static_cast<wide>(part[i]);
        return values;
      });
      auto part = exec::load16(pieces + begin);
#pragma unroll
      for (int i = 0; i < Width; ++i) part[i] = static_cast<T>(sum.at[i]);
      exec::store16(out + begin, part);
      return;
    }
  }
  auto const end = begin + Width < n ? begin + Width : n;
  for (auto i = begin; i < end; ++i)
    out[i] = static_cast<T>(tree_of<tree_levels(Width), wide>(
        ranks, [&](int r) { return static_cast<wide>(pieces[r * stride + i]); }));
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
  bool const aligned = exec::aligned16(pieces, s.stride) && exec::aligned16(out);
  if constexpr (Operation == reduction::sum && std::floating_point<accumulator_t<T>>)
    if (s.order == summation::binary_tree) {
      if (aligned && s.ranks < 1 << tree_levels(width))
        exec::launch(space.lane, shape(width), &add_pieces_as_tree<T, width>, out, pieces, s.n, s.stride,
                     s.ranks);
      else
        exec::launch(space.lane, shape(1), &add_pieces_as_tree<T, 1>, out, pieces, s.n, s.stride, s.ranks);
      return;
    }
  if (aligned)
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
