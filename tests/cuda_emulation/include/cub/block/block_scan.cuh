// The emulation's stand-in for CUB's header of this name.
#ifndef TESSERA_CUDA_EMULATION_CUB_BLOCK_SCAN_CUH
#define TESSERA_CUDA_EMULATION_CUB_BLOCK_SCAN_CUH

#include <cub/detail/lanes.cuh>

namespace cub {

enum BlockScanAlgorithm { BLOCK_SCAN_RAKING, BLOCK_SCAN_RAKING_MEMOIZE, BLOCK_SCAN_WARP_SCANS };

/// The storage may be used again after a barrier.
template <class T, int BlockDimX, BlockScanAlgorithm Algorithm = BLOCK_SCAN_RAKING, int BlockDimY = 1,
          int BlockDimZ = 1>
class BlockScan {
  static constexpr int threads = BlockDimX * BlockDimY * BlockDimZ, warps = (threads + 31) / 32;

public:
  struct TempStorage {
    T of_warp[warps];
  };

  explicit BlockScan(TempStorage& storage) : storage_(storage) {}

  template <class Op>
  void InclusiveScan(T input, T& output, Op op, T& aggregate) {
    scan(input, op, output, aggregate);
  }
  template <class Op>
  void InclusiveScan(T input, T& output, Op op) {
    T aggregate;
    scan(input, op, output, aggregate);
  }
  template <class Op>
  void ExclusiveScan(T input, T& output, T initial, Op op, T& aggregate) {
    T inclusive;
    auto const before = scan(input, op, inclusive, aggregate);
    output = before.exists ? op(initial, before.value) : initial;
  }
  template <class Op>
  void ExclusiveScan(T input, T& output, T initial, Op op) {
    T aggregate;
    ExclusiveScan(input, output, initial, op, aggregate);
  }
  void InclusiveSum(T input, T& output) { InclusiveScan(input, output, cub::Sum{}); }
  void InclusiveSum(T input, T& output, T& aggregate) { InclusiveScan(input, output, cub::Sum{}, aggregate); }
  void ExclusiveSum(T input, T& output) { ExclusiveScan(input, output, T{}, cub::Sum{}); }
  void ExclusiveSum(T input, T& output, T& aggregate) {
    ExclusiveScan(input, output, T{}, cub::Sum{}, aggregate);
  }

private:
  struct prefix {
    T value;
    bool exists;
  };

  /// What comes before the thread.
  template <class Op>
  prefix scan(T input, Op op, T& inclusive, T& aggregate) {
    auto const thread = emulation::linear_thread<BlockDimX, BlockDimY, BlockDimZ>();
    auto const lane = thread % 32, warp = thread / 32;
    auto const mask = emulation::lanes_of_warp(thread, threads);
    auto value = input;
    for (int distance = 1; distance < 32; distance *= 2) {
      auto const other = emulation::from_below(mask, value, distance, 32);
      if (lane >= distance) value = op(other, value);
    }
    auto const before_lane = emulation::from_below(mask, value, 1, 32);
    auto const last = thread + 1 == threads || lane == 31;
    if (last) storage_.of_warp[warp] = value;
    __syncthreads();
    prefix before{input, false};
    aggregate = storage_.of_warp[0];
    for (int w = 0; w < warps; ++w) {
      if (w == warp && w > 0)
        before = {aggregate, true}, aggregate = op(aggregate, storage_.of_warp[w]);
      else if (w > 0)
        aggregate = op(aggregate, storage_.of_warp[w]);
    }
    inclusive = before.exists ? op(before.value, value) : value;
    if (lane > 0) before = {before.exists ? op(before.value, before_lane) : before_lane, true};
    return before;
  }

  TempStorage& storage_;
};

} // namespace cub

#endif
