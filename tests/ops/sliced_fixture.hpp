/// What the tests of losses over a cut vocabulary share, on the host and on CUDA.
#ifndef TESSERA_TESTS_OPS_SLICED_FIXTURE_HPP
#define TESSERA_TESTS_OPS_SLICED_FIXTURE_HPP

#include <vector>

#include <tessera/ops/sliced_cross_entropy.hpp>

#include "ops/fixture.hpp"

namespace sliced_fixture {

using namespace fixture;

/// Where the slices of a vocabulary begin, and its end: nothing cut, halves, uneven with empty ones.
inline std::vector<std::vector<index_t>> cuts_of(index_t classes) {
  return {{0, classes},
          {0, classes / 2, classes},
          {0, 0, classes / 3, classes / 3, (classes + 1) / 2, classes, classes}};
}

/// Targets in [0, classes), every third ignored.
inline tensor<std::int32_t, 1> some_targets(index_t rows, index_t classes) {
  auto targets = reference::integers(rows, static_cast<std::int32_t>(classes), 7);
  for (index_t r = 2; r < rows; r += 3) targets(r) = ops::ignore_index;
  return targets;
}

/// Losses and gradients from the definition, in float64.
struct exact {
  numbers losses, gradient;
  double sum = 0, count = 0;

  template <memory_space M>
  exact(numbers const& x, index_t rows, index_t classes, std::span<std::int32_t const> targets,
        ops::sliced_cross_entropy_options<M> const& options)
      : losses(static_cast<std::size_t>(rows)), gradient(x.size()) {
    double const smooth = options.label_smoothing, z = options.z_loss, scale = options.gradient_scale;
    auto const n = static_cast<std::size_t>(classes);
    for (std::size_t r = 0; r < losses.size(); ++r) {
      if (targets[r] == ops::ignore_index) continue;
      auto const* row = x.data() + r * n;
      auto const target = static_cast<std::size_t>(targets[r]);
      double largest = -INFINITY, total = 0, mean = 0;
      for (std::size_t i = 0; i < n; ++i) largest = std::fmax(largest, row[i]);
      for (std::size_t i = 0; i < n; ++i) total += std::exp(row[i] - largest);
      if (smooth > 0)
        for (std::size_t i = 0; i < n; ++i) mean += row[i] / static_cast<double>(classes);
      auto const log_sum = largest + std::log(total);
      losses[r] = log_sum - (1 - smooth) * row[target] - smooth * mean + z * log_sum * log_sum;
      sum += losses[r];
      count += 1;
      for (std::size_t i = 0; i < n; ++i)
        gradient[r * n + i] =
            scale * (std::exp(row[i] - largest) / total * (1 + 2 * z * log_sum) -
                     (i == target ? 1 - smooth : 0) - smooth / static_cast<double>(classes));
    }
  }
};

} // namespace sliced_fixture

#endif
