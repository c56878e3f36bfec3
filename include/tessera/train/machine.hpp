/// What this machine's processor can do at most: the rate of a large matrix product, measured here and now,
/// to compare a run with. The best of several tries counts, since everything else on the machine only slows
/// it.
///
///     auto const peak = train::matrix_peak<bf16>(ex);      // operations a second, of this rank's threads
///
/// Cost: about half a second. Ranks that share a machine measure at the same time, so that their sum is what
/// the machine gives to all of them at once.
#ifndef TESSERA_TRAIN_MACHINE_HPP
#define TESSERA_TRAIN_MACHINE_HPP

#include <algorithm>
#include <chrono>

#include <tessera/core/tensor.hpp>
#include <tessera/ops/matmul.hpp>

namespace tessera::inline TESSERA_ABI::train {

struct peak_options {
  index_t size = 1024; ///< The matrices are square.
  int tries = 5;
};

namespace detail {

template <storage_scalar T, exec::host_space Ex>
double product_rate(Ex& ex, peak_options options) {
  auto const n = options.size;
  tensor<T, 2> a({n, n}), b({n, n}), c({n, n});
  for (auto& x : a.span()) x = T(0.5f);
  for (auto& x : b.span()) x = T(0.25f);
  auto fastest = 0.0;
  for (int i = 0; i <= options.tries; ++i) {
    auto const start = std::chrono::steady_clock::now();
    ops::matmul(ex, c.view(), a.view(), b.view());
    auto const seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
    // The first one prepares kernels and touches memory.
    if (i > 0 && seconds > 0) fastest = (std::max)(fastest, 2.0 * static_cast<double>(n * n * n) / seconds);
  }
  return fastest;
}

} // namespace detail

/// Operations a second of the faster of a product in T and one in fp32: without 16-bit instructions the
/// latter is what the processor can do.
template <storage_scalar T, exec::host_space Ex>
double matrix_peak(Ex& ex, peak_options options = {}) {
  return (std::max)(detail::product_rate<T>(ex, options), detail::product_rate<float>(ex, options));
}

} // namespace tessera::inline TESSERA_ABI::train

#endif
