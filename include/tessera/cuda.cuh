/// All of Tessera's CUDA side, for .cu files. A single operation comes by its own header, such as
/// <tessera/ops/cuda/gelu.cuh>, and compiles faster.
///
/// Made by tests/house/make_single_header.py.
#ifndef TESSERA_CUDA_CUH
#define TESSERA_CUDA_CUH

#include <tessera/exec/copy_cuda.hpp>
#include <tessera/exec/cuda.hpp>
#include <tessera/exec/cuda_memory.hpp>
#include <tessera/exec/device.cuh>
#include <tessera/exec/elements.cuh>
#include <tessera/exec/event.hpp>
#include <tessera/exec/graph.hpp>
#include <tessera/exec/launch.cuh>
#include <tessera/exec/pack.cuh>

#include <tessera/ops/cuda/add.cuh>
#include <tessera/ops/cuda/attention.cuh>
#include <tessera/ops/cuda/cast.cuh>
#include <tessera/ops/cuda/copy_rows.cuh>
#include <tessera/ops/cuda/cross_entropy.cuh>
#include <tessera/ops/cuda/dropout.cuh>
#include <tessera/ops/cuda/embedding.cuh>
#include <tessera/ops/cuda/gelu.cuh>
#include <tessera/ops/cuda/layer_norm.cuh>
#include <tessera/ops/cuda/linear.cuh>
#include <tessera/ops/cuda/linear_cross_entropy.cuh>
#include <tessera/ops/cuda/linear_swiglu.cuh>
#include <tessera/ops/cuda/matmul.cuh>
#include <tessera/ops/cuda/merge_attention.cuh>
#include <tessera/ops/cuda/random_normal.cuh>
#include <tessera/ops/cuda/reduce.cuh>
#include <tessera/ops/cuda/rms_norm.cuh>
#include <tessera/ops/cuda/rotary.cuh>
#include <tessera/ops/cuda/scale.cuh>
#include <tessera/ops/cuda/sliced_cross_entropy.cuh>
#include <tessera/ops/cuda/swiglu.cuh>

#if defined(TESSERA_WITH_NCCL)
#include <tessera/comm/cuda/nccl.cuh>
#endif

#include <tessera/optim/cuda/flat_update.cuh>

#endif
