/// linear_swiglu in double, by plain loops: what the host's and the device's are compared with.
#ifndef TESSERA_TESTS_OPS_LINEAR_SWIGLU_REFERENCE_HPP
#define TESSERA_TESTS_OPS_LINEAR_SWIGLU_REFERENCE_HPP

#include <cmath>

#include "ops/fixture.hpp"

namespace linear_swiglu_reference {

using namespace tessera;
using fixture::numbers;

/// The unit of a row (gate, up), in double.
inline double unit(double gate, double up) {
  return gate / (1 + std::exp(-gate)) * up;
}

/// in weight^T and what the unit makes of it, in double. Row-major [m, k], [2 f, k].
struct exact {
  numbers gate_up, out;

  exact(index_t m, index_t k, index_t f, numbers const& in, numbers const& weight) {
    auto const cell = [k](index_t row, index_t l) { return static_cast<std::size_t>(row * k + l); };
    for (index_t i = 0; i < m; ++i) {
      auto const row = gate_up.size();
      for (index_t j = 0; j < 2 * f; ++j) {
        double sum = 0;
        for (index_t l = 0; l < k; ++l) sum += in[cell(i, l)] * weight[cell(j, l)];
        gate_up.push_back(sum);
      }
      for (index_t j = 0; j < f; ++j)
        out.push_back(
            unit(gate_up[row + static_cast<std::size_t>(j)], gate_up[row + static_cast<std::size_t>(f + j)]));
    }
  }
};

} // namespace linear_swiglu_reference

#endif
