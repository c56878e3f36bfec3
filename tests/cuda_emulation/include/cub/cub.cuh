// The emulation's stand-in for CUB's header of this name.
#ifndef TESSERA_CUDA_EMULATION_CUB_CUB_CUH
#define TESSERA_CUDA_EMULATION_CUB_CUB_CUH

#include <cub/block/block_reduce.cuh>
#include <cub/block/block_scan.cuh>
#include <cub/device/device_radix_sort.cuh>
#include <cub/warp/warp_reduce.cuh>

#endif
