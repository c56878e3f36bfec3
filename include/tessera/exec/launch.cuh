/// How kernels are declared and started.
///
///     template <class T>
///     TESSERA_KERNEL void double_all(T* x, index_t n) { ... }
///
///     exec::launch(ex, {.grid = exec::grid_of(blocks), .block = dim3(256)}, double_all<T>, x, n);
#ifndef TESSERA_EXEC_LAUNCH_CUH
#define TESSERA_EXEC_LAUNCH_CUH

#include <tessera/exec/cuda.hpp>
#include <tessera/exec/device.cuh>

/// A kernel belongs to the library or program that it is compiled into: a second one of the same name, in
/// another library that was built for other GPUs, must not be taken for it.
#define TESSERA_KERNEL __attribute__((visibility("hidden"))) __global__

namespace tessera::inline TESSERA_ABI::exec {

struct launch_shape {
  dim3 grid = dim3(1);
  dim3 block = dim3(1);
  /// Dynamic shared memory; the kernel reaches it by dynamic_shared<T>() (exec/device.cuh).
  std::size_t shared_bytes = 0;
  site where = site::here();
};

/// Starts a kernel in the space's stream. A grid without blocks starts nothing.
template <cuda_space Ex, class... Parameters, class... Arguments>
void launch(Ex& ex, launch_shape const& shape, void (*kernel)(Parameters...), Arguments&&... arguments) {
  if (shape.grid.x == 0 || shape.grid.y == 0 || shape.grid.z == 0) return;
  // More than this must be asked for.
  constexpr std::size_t always_allowed = std::size_t{48} << 10;
  if (shape.shared_bytes > always_allowed)
    cuda_check(cudaFuncSetAttribute(reinterpret_cast<void const*>(kernel),
                                    cudaFuncAttributeMaxDynamicSharedMemorySize,
                                    narrow<int>(shape.shared_bytes, shape.where)),
               "cudaFuncSetAttribute", shape.where);
  cudaLaunchConfig_t configuration{};
  configuration.gridDim = shape.grid;
  configuration.blockDim = shape.block;
  configuration.dynamicSmemBytes = shape.shared_bytes;
  configuration.stream = ex.stream();
  cuda_check(cudaLaunchKernelEx(&configuration, kernel, static_cast<Arguments&&>(arguments)...),
             "cudaLaunchKernelEx", shape.where);
}

/// A grid of as many blocks. Throws size_error (E-core-003) for more than 2^32 - 1.
inline dim3 grid_of(index_t x, index_t y = 1, index_t z = 1, site where = site::here()) {
  return dim3(narrow<unsigned>(x, where), narrow<unsigned>(y, where), narrow<unsigned>(z, where));
}

/// Blocks for `items` that a grid-stride loop walks over, `items_per_block` at a time: one block for each
/// piece, but not more than `waves` for each multiprocessor. Of no influence on results.
template <cuda_space Ex>
dim3 grid_for(Ex& ex, index_t items, index_t items_per_block, int waves = 8, site where = site::here()) {
  auto const needed = (items + items_per_block - 1) / items_per_block;
  auto const useful = index_t{ex.multiprocessors()} * waves;
  return grid_of(needed < useful ? needed : useful, 1, 1, where);
}

/// Whether 16-byte accesses reach this address, and every row that starts a multiple of `stride` after it.
template <class T>
bool aligned16(T const* data, index_t stride = 0) noexcept {
  return reinterpret_cast<std::uintptr_t>(data) % 16 == 0 &&
         stride * static_cast<index_t>(sizeof(T)) % 16 == 0;
}

} // namespace tessera::inline TESSERA_ABI::exec

#endif
