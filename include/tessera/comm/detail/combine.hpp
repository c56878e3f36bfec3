/// The arithmetic of rank_order and binary_tree: element by element, accumulated in fp32 or better, rounded
/// once.
#ifndef TESSERA_COMM_DETAIL_COMBINE_HPP
#define TESSERA_COMM_DETAIL_COMBINE_HPP

#include <tessera/comm/detail/call.hpp>

namespace tessera::inline TESSERA_ABI::comm::detail {

template <class T>
struct accumulator {
  using type = T;
};
template <storage_scalar T>
struct accumulator<T> {
  using type = float;
};
template <class T>
using accumulator_t = typename accumulator<T>::type;

/// The larger or smaller of two; a NaN of either is the result.
template <class A>
TESSERA_HOST_DEVICE constexpr A larger(A a, A b) noexcept {
  return (b > a || b != b) && a == a ? b : a;
}
template <class A>
TESSERA_HOST_DEVICE constexpr A smaller(A a, A b) noexcept {
  return (b < a || b != b) && a == a ? b : a;
}

/// One step of a reduction: a becomes a combined with b. False where an integer sum overflowed.
template <reduction Operation, class A>
TESSERA_HOST_DEVICE constexpr bool combine_value(A& a, A b) noexcept {
  if constexpr (Operation == reduction::max) {
    a = larger(a, b);
  } else if constexpr (Operation == reduction::min) {
    a = smaller(a, b);
  } else if constexpr (std::integral<A>) {
    using bits = std::make_unsigned_t<A>;
    auto const x = static_cast<bits>(a), y = static_cast<bits>(b), sum = static_cast<bits>(x + y);
    a = static_cast<A>(sum);
    if constexpr (std::signed_integral<A>)
      return static_cast<A>((x ^ sum) & (y ^ sum)) >= 0; // both have one sign, the sum has the other
    else
      return sum >= x;
  } else {
    a += b;
  }
  return true;
}

/// a[i] becomes a[i] combined with b[i]. False where an integer sum overflowed.
template <reduction Operation, class A, class T>
bool combine_into(A* a, T const* b, index_t n) noexcept {
  bool exact = true;
  for (index_t i = 0; i < n; ++i) exact &= combine_value<Operation>(a[i], static_cast<A>(b[i]));
  return exact;
}
template <class A, class T>
bool combine_into(A* a, T const* b, index_t n, reduction operation) noexcept {
  switch (operation) {
  case reduction::max:
    return combine_into<reduction::max>(a, b, n);
  case reduction::min:
    return combine_into<reduction::min>(a, b, n);
  case reduction::sum:
    break;
  }
  return combine_into<reduction::sum>(a, b, n);
}

/// How many of `n` summands the left branch of their tree has: the largest power of two below n, n > 1.
constexpr int left_branch(int n) noexcept {
  int h = 1;
  while (h < n - h) h *= 2;
  return h;
}

/// sum[i] = the tree over the `ranks` pieces that start at `pieces`, as summation::binary_tree says. `length`
/// is a tile at most; what is on the stack is one tile for each level of the tree.
template <index_t Tile, class A, class T>
void add_as_tree(A* sum, T const* pieces, index_t stride, int ranks, index_t length) noexcept {
  if (ranks == 1) {
    for (index_t i = 0; i < length; ++i) sum[i] = static_cast<A>(pieces[i]);
    return;
  }
  auto const left = left_branch(ranks);
  auto const* others = pieces + left * stride;
  add_as_tree<Tile>(sum, pieces, stride, left, length);
  if (left + 1 == ranks) {
    combine_into<reduction::sum>(sum, others, length);
    return;
  }
  A right[Tile];
  add_as_tree<Tile>(right, others, stride, ranks - left, length);
  combine_into<reduction::sum>(sum, right, length);
}

/// out[i] = reduction over r of pieces[r * stride + i]. `out` may be the first piece. Works through tiles
/// that stay in the first-level cache. The order of the ranks is nothing to integers, maxima and minima.
template <reducible_scalar T>
bool combine(void*, combine_step const& step) {
  constexpr index_t tile = 1024;
  auto* out = static_cast<T*>(step.out);
  auto const* pieces = static_cast<T const*>(step.pieces);
  accumulator_t<T> sum[tile];
  if constexpr (std::floating_point<accumulator_t<T>>)
    if (step.order == summation::binary_tree && step.operation == reduction::sum) {
      constexpr index_t branch = 256; // as much on the stack for each level
      for (index_t begin = 0; begin < step.n; begin += branch) {
        auto const length = step.n - begin < branch ? step.n - begin : branch;
        add_as_tree<branch>(sum, pieces + begin, step.stride, step.ranks, length);
        for (index_t i = 0; i < length; ++i) out[begin + i] = static_cast<T>(sum[i]);
      }
      return true;
    }
  bool exact = true;
  for (index_t begin = 0; begin < step.n; begin += tile) {
    auto const length = step.n - begin < tile ? step.n - begin : tile;
    for (index_t i = 0; i < length; ++i) sum[i] = static_cast<accumulator_t<T>>(pieces[begin + i]);
    for (int r = 1; r < step.ranks; ++r)
      exact &= combine_into(sum, pieces + r * step.stride + begin, length, step.operation);
    for (index_t i = 0; i < length; ++i) out[begin + i] = static_cast<T>(sum[i]);
  }
  return exact;
}

} // namespace tessera::inline TESSERA_ABI::comm::detail

#endif
