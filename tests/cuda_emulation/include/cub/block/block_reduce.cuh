// The emulation's stand-in for CUB's header of this name.
#ifndef TESSERA_CUDA_EMULATION_CUB_BLOCK_REDUCE_CUH
#define TESSERA_CUDA_EMULATION_CUB_BLOCK_REDUCE_CUH

#include <cub/detail/lanes.cuh>

namespace cub {

enum BlockReduceAlgorithm {
  BLOCK_REDUCE_RAKING_COMMUTATIVE_ONLY,
  BLOCK_REDUCE_RAKING,
  BLOCK_REDUCE_WARP_REDUCTIONS,
  BLOCK_REDUCE_WARP_REDUCTIONS_NONDETERMINISTIC,
};

/// The result is thread 0's. The storage may be used again after a barrier.
template <class T, int BlockDimX, BlockReduceAlgorithm Algorithm = BLOCK_REDUCE_WARP_REDUCTIONS,
          int BlockDimY = 1, int BlockDimZ = 1>
class BlockReduce {
  static constexpr int threads = BlockDimX * BlockDimY * BlockDimZ, warps = (threads + 31) / 32;

public:
  struct TempStorage {
    T of_warp[warps];
  };

  explicit BlockReduce(TempStorage& storage) : storage_(storage) {}

  template <class Op>
  T Reduce(T value, Op op, int valid = threads) {
    auto const thread = emulation::linear_thread<BlockDimX, BlockDimY, BlockDimZ>();
    auto const first = thread / 32 * 32;
    value = emulation::reduce_lanes(emulation::lanes_of_warp(thread, threads), value, op, thread % 32, 32,
                                    valid - first < 32 ? valid - first : 32);
    if (thread % 32 == 0) storage_.of_warp[thread / 32] = value;
    __syncthreads();
    if (thread != 0) return emulation::unspecified<T>();
    for (int w = 1; w < warps && w * 32 < valid; ++w) value = op(value, storage_.of_warp[w]);
    return value;
  }
  template <int Items, class Op>
  T Reduce(T (&values)[Items], Op op) {
    auto value = values[0];
    for (int i = 1; i < Items; ++i) value = op(value, values[i]);
    return Reduce(value, op);
  }
  T Sum(T value) { return Reduce(value, cub::Sum{}); }
  T Sum(T value, int valid) { return Reduce(value, cub::Sum{}, valid); }
  template <int Items>
  T Sum(T (&values)[Items]) {
    return Reduce(values, cub::Sum{});
  }

private:
  TempStorage& storage_;
};

} // namespace cub

#endif
