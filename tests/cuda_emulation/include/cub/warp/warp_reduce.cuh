// The emulation's stand-in for CUB's header of this name.
#ifndef TESSERA_CUDA_EMULATION_CUB_WARP_REDUCE_CUH
#define TESSERA_CUDA_EMULATION_CUB_WARP_REDUCE_CUH

#include <cub/detail/lanes.cuh>

namespace cub {

/// The result is the first lane's, of each group of LogicalWarpThreads.
template <class T, int LogicalWarpThreads = 32>
class WarpReduce {
  static_assert(LogicalWarpThreads >= 1 && LogicalWarpThreads <= 32 &&
                    (LogicalWarpThreads & (LogicalWarpThreads - 1)) == 0,
                "the emulation has groups of powers of two");

public:
  struct TempStorage {};

  explicit WarpReduce(TempStorage&) {}

  template <class Op>
  T Reduce(T value, Op op, int valid = LogicalWarpThreads) {
    auto const lane = static_cast<int>(cuda_emulation::lane()) % LogicalWarpThreads;
    auto const group = static_cast<int>(cuda_emulation::lane()) / LogicalWarpThreads * LogicalWarpThreads;
    constexpr unsigned ones = LogicalWarpThreads == 32 ? ~0u : (1u << LogicalWarpThreads % 32) - 1;
    auto const result = emulation::reduce_lanes(ones << group, value, op, lane, LogicalWarpThreads, valid);
    return lane == 0 ? result : emulation::unspecified<T>();
  }
  T Sum(T value) { return Reduce(value, cub::Sum{}); }
  T Sum(T value, int valid) { return Reduce(value, cub::Sum{}, valid); }
};

} // namespace cub

#endif
