/// What a test sets in the emulated cuBLASLt.
#ifndef TESSERA_CUDA_EMULATION_CUBLASLT_HPP
#define TESSERA_CUDA_EMULATION_CUBLASLT_HPP

#include <cstdint>

namespace cuda_emulation {

/// From now on there is no algorithm for products with an epilogue, as on a device that lacks them.
void refuse_epilogues(bool refuse) noexcept;
/// Products that were started so far, with any epilogue and with one.
std::int64_t products_started() noexcept;
std::int64_t epilogues_started() noexcept;
/// Matrices of those products, batches counted out.
std::int64_t matrices_multiplied() noexcept;
/// Handles and descriptors that were made and not destroyed.
std::int64_t cublaslt_objects() noexcept;

} // namespace cuda_emulation

#endif
