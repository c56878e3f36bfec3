/// What a test asks and sets in the emulated NCCL.
#ifndef TESSERA_CUDA_EMULATION_NCCL_HPP
#define TESSERA_CUDA_EMULATION_NCCL_HPP

#include <cstdint>

#include <nccl.h>

namespace cuda_emulation {

/// Communicators that were made and neither destroyed nor aborted.
std::int64_t nccl_communicators() noexcept;
/// Launches (single calls, or groups as a whole) that were put into streams so far.
std::int64_t nccl_launches() noexcept;
/// From now on ncclCommGetAsyncError answers rank `rank` of every communicator with `error`; ncclSuccess
/// calls it off.
void set_nccl_async_error(int rank, ncclResult_t error) noexcept;

} // namespace cuda_emulation

#endif
