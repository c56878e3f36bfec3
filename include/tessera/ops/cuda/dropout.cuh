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
  /// There is a residual only where both types are one.
  template <exec::cuda_space Ex, storage_scalar T, storage_scalar In, dropout_numbers Numbers>
  static void run(Ex& ex, view<T, 2, typename Ex::memory> out, view<T const, 2, typename Ex::memory> residual,
                  view<In const, 2, typename Ex::memory> in, dropout_mask<Numbers> const& mask) {
    auto const size = in.size();
    view<T, 1, typename Ex::memory> const all_out(out.data(), {size});
    view<In const, 1, typename Ex::memory> const all_in(in.data(), {size});
    cuda_detail::dropout_elements<Numbers> const dropout{mask};
    auto const y = exec::writes(out.data());
    auto const x = exec::reads(in.data());
    if constexpr (std::same_as<T, In>)
      if (residual.data() != nullptr) {
        if (mask.probability > 0)
          exec::for_elements(ex, size, dropout, y, exec::reads(residual.data()), x);
        else
          add_on<exec::cuda_backend>::run(
              ex, all_out, view<T const, 1, typename Ex::memory>(residual.data(), {size}), all_in);
        return;
      }
    if (mask.probability > 0)
      exec::for_elements(ex, size, dropout, y, x);
    else
      cast_on<exec::cuda_backend>::run(ex, all_out, all_in);
  }
};

} // namespace tessera::inline TESSERA_ABI::ops

#endif
