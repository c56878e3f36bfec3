/// All of Tessera's CUDA side, for .cu files. Each header is as usable alone.
#ifndef TESSERA_CUDA_CUH
#define TESSERA_CUDA_CUH

#include <tessera/exec/copy_cuda.hpp>
#include <tessera/exec/cuda.hpp>
#include <tessera/exec/cuda_memory.hpp>
#include <tessera/exec/device.cuh>
#include <tessera/exec/event.hpp>
#include <tessera/exec/graph.hpp>
#include <tessera/exec/launch.cuh>
#include <tessera/exec/range.hpp>

#endif
