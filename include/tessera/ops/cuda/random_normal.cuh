/// random_normal on CUDA: one pass; both numbers of a pair are drawn for themselves.
#ifndef TESSERA_OPS_CUDA_RANDOM_NORMAL_CUH
#define TESSERA_OPS_CUDA_RANDOM_NORMAL_CUH

#include <tessera/exec/elements.cuh>
#include <tessera/ops/random_normal.hpp>
#include <tessera/ops/scale.hpp>

namespace tessera::inline TESSERA_ABI::ops {

namespace cuda_detail {

struct random_normal_elements {
  philox random;
  std::uint64_t first_index;
  float mean, deviation;

  template <int N>
  TESSERA_HOST_DEVICE void operator()(index_t first, float (&y)[N]) const noexcept {
    for (int i = 0; i < N; ++i)
      y[i] = mean + deviation * random.normal(first_index + static_cast<std::uint64_t>(first + i));
  }
};

} // namespace cuda_detail

template <>
struct random_normal_on<exec::cuda_backend> {
  template <exec::cuda_space Ex, storage_scalar T>
  static void run(Ex& ex, view<T, 1, typename Ex::memory> out, random_normal_options const& options) {
    exec::for_elements(
        ex, out.size(),
        cuda_detail::random_normal_elements{.random = philox(options.seed, options.stream),
                                            .first_index = static_cast<std::uint64_t>(options.first),
                                            .mean = options.mean,
                                            .deviation = options.deviation},
        exec::writes(out.data()));
  }
};

} // namespace tessera::inline TESSERA_ABI::ops

#endif
