/// dropout on CUDA: one pass that draws its random words where it uses them, four elements from one counter.
#ifndef TESSERA_OPS_CUDA_DROPOUT_CUH
#define TESSERA_OPS_CUDA_DROPOUT_CUH

#include <tessera/exec/elements.cuh>
#include <tessera/ops/cuda/add.cuh>
#include <tessera/ops/cuda/cast.cuh>
#include <tessera/ops/dropout.hpp>

namespace tessera::inline TESSERA_ABI::ops {

namespace cuda_detail {

/// y = dropout(x), or residual + dropout(x).
template <dropout_numbers Numbers>
struct dropout_elements {
  dropout_mask<Numbers> mask;

  template <int N>
  TESSERA_HOST_DEVICE void operator()(index_t first, float (&y)[N], float const (&x)[N]) const noexcept {
    auto const run = mask.numbers(first);
    if (N >= 4 && run.index % 4 == 0 && run.count >= N) {
      for (int quad = 0; quad < N / 4; ++quad) {
        auto const four = mask.random.words(run.index / 4 + static_cast<std::uint64_t>(quad));
        for (int w = 0; w < 4; ++w) y[4 * quad + w] = mask.apply(x[4 * quad + w], four.word[w]);
      }
    } else {
      for (int i = 0; i < N; ++i) {
        auto const index =
            i < run.count ? run.index + static_cast<std::uint64_t>(i) : mask.numbers(first + i).index;
        y[i] = mask.apply(x[i], mask.random.bits(index));
      }
    }
  }

  template <int N>
  TESSERA_HOST_DEVICE void operator()(index_t first, float (&y)[N], float const (&residual)[N],
                                      float const (&x)[N]) const noexcept {
    (*this)(first, y, x);
    for (int i = 0; i < N; ++i) y[i] += residual[i];
  }
};

} // namespace cuda_detail

template <>
struct dropout_on<exec::cuda_backend> {
  template <exec::cuda_space Ex, storage_scalar T, dropout_numbers Numbers>
  static void run(Ex& ex, view<T, 2, typename Ex::memory> out, view<T const, 2, typename Ex::memory> residual,
                  view<T const, 2, typename Ex::memory> in, dropout_mask<Numbers> const& mask) {
    using array = view<T const, 1, typename Ex::memory>;
    auto const size = in.size();
    cuda_detail::dropout_elements<Numbers> const dropout{mask};
    auto const y = exec::writes(out.data());
    auto const r = exec::reads(residual.data()), x = exec::reads(in.data());
    if (mask.probability > 0 && residual.data() != nullptr)
      exec::for_elements(ex, size, dropout, y, r, x);
    else if (mask.probability > 0)
      exec::for_elements(ex, size, dropout, y, x);
    else if (residual.data() != nullptr)
      add_on<exec::cuda_backend>::run(ex, view<T, 1, typename Ex::memory>(out.data(), {size}),
                                      array(residual.data(), {size}), array(in.data(), {size}));
    else
      cast_on<exec::cuda_backend>::run(ex, view<T, 1, typename Ex::memory>(out.data(), {size}),
                                       array(in.data(), {size}));
  }
};

} // namespace tessera::inline TESSERA_ABI::ops

#endif
