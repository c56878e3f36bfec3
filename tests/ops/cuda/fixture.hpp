/// What the tests of CUDA's memory-bound operations share.
#ifndef TESSERA_TESTS_OPS_CUDA_FIXTURE_HPP
#define TESSERA_TESTS_OPS_CUDA_FIXTURE_HPP

#include <tessera/exec/host.hpp>

#include "ops/fixture.hpp"
#include "support/device_rows.hpp"

namespace cuda_fixture {

using namespace tessera;
using fixture::bits;
using fixture::numbers;
using fixture::types;
using test::device_rows;
using test::lying;
using test::lyings;

/// Numbers of elements that break kernels: nothing, one, around a pack, a warp and a block.
inline constexpr index_t counts[] = {0, 1, 7, 17, 33, 255, 2053};

/// A device's result is within the storage type's tolerance of the values in float64 and of the host's.
template <class T, int Rank>
bool agree(tensor<T, 2> const& device, numbers const& exact, tensor<T, Rank> const& host,
           double tolerance = reference::tolerance<T>()) {
  return reference::max_relative_error(device, exact) < tolerance &&
         reference::max_relative_error(device, reference::doubles(host.span())) < tolerance;
}

/// The doubles of f(row, number of the row), one row after the other.
template <class F>
numbers by_rows(numbers const& x, index_t rows, index_t width, F&& f) {
  numbers out;
  for (index_t r = 0; r < rows; ++r) {
    auto const begin = x.begin() + r * width;
    auto const row = f(numbers(begin, begin + width), r);
    out.insert(out.end(), row.begin(), row.end());
  }
  return out;
}

inline numbers part(numbers const& x, index_t row, index_t width) {
  auto const begin = x.begin() + row * width;
  return numbers(begin, begin + width);
}

} // namespace cuda_fixture

#endif
