// What the emulated pieces of CUB share. Their arithmetic is in another order than that of the real ones.
#ifndef TESSERA_CUDA_EMULATION_CUB_LANES_CUH
#define TESSERA_CUDA_EMULATION_CUB_LANES_CUH

#include <cuda_runtime.h>

namespace cub {

struct Sum {
  template <class T>
  T operator()(T const& a, T const& b) const {
    return a + b;
  }
};
struct Max {
  template <class T>
  T operator()(T const& a, T const& b) const {
    return a < b ? b : a;
  }
};
struct Min {
  template <class T>
  T operator()(T const& a, T const& b) const {
    return b < a ? b : a;
  }
};

namespace emulation {

/// A value as the words that lanes exchange.
template <class T>
struct words {
  static constexpr int count = (sizeof(T) + 3) / 4;
  unsigned word[count] = {};

  explicit words(T const& value) { std::memcpy(word, &value, sizeof(T)); }
  T value() const {
    T result;
    std::memcpy(&result, word, sizeof(T));
    return result;
  }
};

template <class T>
T from_above(unsigned mask, T const& value, int distance, int width) {
  words<T> w(value);
  for (auto& word : w.word) word = __shfl_down_sync(mask, word, static_cast<unsigned>(distance), width);
  return w.value();
}
template <class T>
T from_below(unsigned mask, T const& value, int distance, int width) {
  words<T> w(value);
  for (auto& word : w.word) word = __shfl_up_sync(mask, word, static_cast<unsigned>(distance), width);
  return w.value();
}
template <class T>
T from_lane(unsigned mask, T const& value, int lane, int width) {
  words<T> w(value);
  for (auto& word : w.word) word = __shfl_sync(mask, word, lane, width);
  return w.value();
}

/// What a function promises to some threads only, the others get as something they will notice: NaN, -1.
template <class T>
T unspecified() {
  T result;
  std::memset(static_cast<void*>(&result), 0xff, sizeof(T));
  return result;
}

/// The sum of `valid` lanes of a group of `width`, in its first lane.
template <class T, class Op>
T reduce_lanes(unsigned mask, T value, Op op, int lane, int width, int valid) {
  for (int distance = 1; distance < width; distance *= 2) {
    auto const other = from_above(mask, value, distance, width);
    // Lanes that begin a whole group of 2 * distance take what the group's other half has.
    if (lane % (2 * distance) == 0 && lane + distance < valid) value = op(value, other);
  }
  return value;
}

template <int X, int Y, int Z>
int linear_thread() {
  auto const index = threadIdx;
  if (static_cast<int>(blockDim.x) != X || static_cast<int>(blockDim.y) != Y ||
      static_cast<int>(blockDim.z) != Z)
    cuda_emulation::trap("a block of another size than the template arguments of a piece of CUB say");
  return static_cast<int>((index.z * Y + index.y) * X + index.x);
}

/// The lanes of the running thread's warp, of which the last of a block may have fewer.
inline unsigned lanes_of_warp(int thread, int threads) {
  auto const rest = threads - thread / 32 * 32;
  return rest >= 32 ? ~0u : (1u << rest) - 1;
}

} // namespace emulation
} // namespace cub

#endif
