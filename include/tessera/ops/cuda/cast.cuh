/// cast on CUDA: one pass; between equal types the device's own copy.
#ifndef TESSERA_OPS_CUDA_CAST_CUH
#define TESSERA_OPS_CUDA_CAST_CUH

#include <tessera/exec/copy_cuda.hpp>
#include <tessera/exec/elements.cuh>
#include <tessera/ops/cast.hpp>

namespace tessera::inline TESSERA_ABI::ops {

namespace cuda_detail {
struct copy_element {
  TESSERA_HOST_DEVICE void operator()(float& y, float x) const noexcept { y = x; }
};
} // namespace cuda_detail

template <>
struct cast_on<exec::cuda_backend> {
  template <exec::cuda_space Ex, storage_scalar To, storage_scalar From>
  static void run(Ex& ex, view<To, 1, typename Ex::memory> out, view<From const, 1, typename Ex::memory> in) {
    if constexpr (std::same_as<To, From>) {
      if (out.data() != in.data()) exec::copy(ex, out.span(), in.span());
    } else {
      exec::for_elements(ex, in.size(), cuda_detail::copy_element{}, exec::writes(out.data()),
                         exec::reads(in.data()));
    }
  }
};

} // namespace tessera::inline TESSERA_ABI::ops

#endif
