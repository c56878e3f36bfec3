/// linear_cross_entropy on CUDA: the same chunks as on the host, by the products and the fused classifier of
/// this folder. With `totals` nothing in it waits for the device.
#ifndef TESSERA_OPS_CUDA_LINEAR_CROSS_ENTROPY_CUH
#define TESSERA_OPS_CUDA_LINEAR_CROSS_ENTROPY_CUH

#include <tessera/ops/cuda/cross_entropy.cuh>
#include <tessera/ops/cuda/matmul.cuh>
#include <tessera/ops/cuda/sliced_cross_entropy.cuh>
#include <tessera/ops/linear_cross_entropy.hpp>

#endif
