/// What this machine's processor or device can do at most: the rate of a large matrix product, measured here
/// and now, to compare a run with. The best of several tries counts, since everything else on the machine
/// only slows it.
///
///     auto const peak = train::matrix_peak<bf16>(ex);      // operations a second, of this rank's space
///
/// Cost: about half a second. Ranks that share a machine measure at the same time, so that their sum is what
/// the machine gives to all of them at once.
#ifndef TESSERA_TRAIN_MACHINE_HPP
#define TESSERA_TRAIN_MACHINE_HPP

#include <algorithm>
#include <chrono>

#include <tessera/core/tensor.hpp>
#include <tessera/ops/matmul.hpp>
#include <tessera/ops/scale.hpp>

namespace tessera::inline TESSERA_ABI::train {

struct peak_options {
  index_t size = 1024; ///< The matrices are square, and doubled while a product ends within `seconds`.
  index_t largest = 8192;
  double seconds = 1e-3;
  int tries = 5;
};

namespace detail {

template <storage_scalar T, exec::space Ex>
double product_rate(Ex& ex, index_t n, int tries) {
  tensor<T, 2, typename Ex::memory> a({n, n}), b({n, n}), c({n, n});
  ops::fill(ex, a.view().template reshape<1>({n * n}), 0.5f);
  ops::fill(ex, b.view().template reshape<1>({n * n}), 0.25f);
  auto fastest = 0.0;
  for (int i = 0; i <= tries; ++i) {
    ex.synchronize();
    auto const start = std::chrono::steady_clock::now();
    ops::matmul(ex, c.view(), a.view(), b.view());
    ex.synchronize();
    auto const seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
    // The first one prepares kernels and touches memory.
    if (i > 0 && seconds > 0) fastest = (std::max)(fastest, 2.0 * static_cast<double>(n * n * n) / seconds);
  }
  return fastest;
}

/// In matrices large enough for the time of a product to be that of its arithmetic.
template <storage_scalar T, exec::space Ex>
double product_rate(Ex& ex, peak_options options) {
  auto rate = product_rate<T>(ex, options.size, options.tries);
  for (auto n = options.size; 2 * n <= options.largest; n *= 2) {
    if (2.0 * static_cast<double>(n * n * n) > rate * options.seconds) break;
    rate = product_rate<T>(ex, 2 * n, options.tries);
  }
  return rate;
}

} // namespace detail

/// Operations a second of the faster of a product in T and one in fp32: without 16-bit instructions the
/// latter is what the processor can do.
template <storage_scalar T, exec::space Ex>
double matrix_peak(Ex& ex, peak_options options = {}) {
  return (std::max)(detail::product_rate<T>(ex, options), detail::product_rate<float>(ex, options));
}

} // namespace tessera::inline TESSERA_ABI::train

#endif
