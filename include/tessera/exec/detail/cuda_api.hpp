/// The CUDA runtime as the library sees it: its header, and the one function that looks at its return codes.
/// Exists under TESSERA_WITH_CUDA.
#ifndef TESSERA_EXEC_DETAIL_CUDA_API_HPP
#define TESSERA_EXEC_DETAIL_CUDA_API_HPP

#if defined(TESSERA_WITH_CUDA)

#include <cuda_runtime.h>

#include <tessera/core/error.hpp>

namespace tessera::inline TESSERA_ABI::exec {

namespace detail {

/// What to do about the errors that a user can do something about.
inline char const* advice_for(cudaError_t status) noexcept {
  switch (status) {
  case cudaErrorNoKernelImageForDevice:
    return "; the program was compiled for other GPUs: add this one's to CMAKE_CUDA_ARCHITECTURES";
  case cudaErrorInsufficientDriver:
    return "; the driver is older than the CUDA toolkit that the program was built with";
  case cudaErrorIllegalAddress:
  case cudaErrorLaunchFailure:
    return "; an earlier kernel failed: run under compute-sanitizer, or with CUDA_LAUNCH_BLOCKING=1";
  case cudaErrorStreamCaptureUnsupported:
  case cudaErrorStreamCaptureImplicit:
    return "; this work cannot become part of a CUDA graph";
  default:
    return "";
  }
}

} // namespace detail

/// Throws library_error (E-exec-101) naming the call, unless it succeeded. The runtime's record of the last
/// error is cleared, so that the next call does not report it again.
inline void cuda_check(cudaError_t status, char const* call, site where = site::here()) {
  if (status == cudaSuccess) return;
  (void)cudaGetLastError();
  throw library_error("E-exec-101", where, call, " failed: ", cudaGetErrorString(status), " (",
                      cudaGetErrorName(status), ")", detail::advice_for(status));
}

/// For destructors, which can tell nobody: what went wrong shows again at the next call that can. The record
/// of it is cleared here, too.
inline void cuda_let_pass(cudaError_t status) noexcept {
  if (status != cudaSuccess) (void)cudaGetLastError();
}

} // namespace tessera::inline TESSERA_ABI::exec

#endif

#endif
