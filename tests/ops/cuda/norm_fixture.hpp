/// What the tests of the two norms on CUDA share.
#ifndef TESSERA_TESTS_OPS_CUDA_NORM_FIXTURE_HPP
#define TESSERA_TESTS_OPS_CUDA_NORM_FIXTURE_HPP

#include "ops/cuda/fixture.hpp"

namespace cuda_fixture {

/// Around a pack, a warp to a row (1024 elements forward, 512 backward), several warps to a row.
inline constexpr fixture::shape norm_shapes[] = {{0, 8},   {3, 0},    {1, 1},    {2, 3},   {7, 129},
                                                 {67, 17}, {1, 1021}, {5, 1024}, {3, 1600}};

/// R is the storage type of what is normalised and of its gradient.
template <class T, class R = T>
struct norm_problem {
  tensor<R, 2> x, dy;
  tensor<T, 1> gain, bias;
  numbers xs, dys, gains, biases; // in double

  norm_problem(index_t rows, index_t width)
      : x(reference::normal<R, 2>({rows, width}, 1, 2.0f)), dy(reference::normal<R, 2>({rows, width}, 2)),
        gain(reference::normal<T, 1>({width}, 3)), bias(reference::normal<T, 1>({width}, 4)),
        xs(reference::doubles(x.span())), dys(reference::doubles(dy.span())),
        gains(reference::doubles(gain.span())), biases(reference::doubles(bias.span())) {}
};

/// Of one row.
struct norm_gradients {
  numbers input, gain, bias;
};

inline numbers twice(numbers values) {
  for (auto& value : values) value *= 2;
  return values;
}
inline void append(numbers& all, numbers const& more) {
  all.insert(all.end(), more.begin(), more.end());
}

} // namespace cuda_fixture

#endif
