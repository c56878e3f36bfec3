/// The arithmetic of rank_order: element by element, rank 0 first, accumulated in fp32 or better, rounded
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
constexpr A larger(A a, A b) noexcept {
  return (b > a || b != b) && a == a ? b : a;
}
template <class A>
constexpr A smaller(A a, A b) noexcept {
  return (b < a || b != b) && a == a ? b : a;
}

/// a[i] becomes a[i] combined with b[i]. False where an integer sum overflowed.
template <class A, class T>
bool combine_into(A* a, T const* b, index_t n, reduction operation) noexcept {
  if (operation == reduction::max) {
    for (index_t i = 0; i < n; ++i) a[i] = larger(a[i], static_cast<A>(b[i]));
  } else if (operation == reduction::min) {
    for (index_t i = 0; i < n; ++i) a[i] = smaller(a[i], static_cast<A>(b[i]));
  } else if constexpr (std::integral<A>) {
    bool overflow = false;
    for (index_t i = 0; i < n; ++i) overflow |= __builtin_add_overflow(a[i], b[i], &a[i]);
    return !overflow;
  } else {
    for (index_t i = 0; i < n; ++i) a[i] += static_cast<A>(b[i]);
  }
  return true;
}

/// out[i] = reduction over r of pieces[r * stride + i]. `out` may be the first piece. Works through tiles
/// that stay in the first-level cache.
template <reducible_scalar T>
bool combine(void* out_bytes, void const* piece_bytes, index_t n, index_t stride, int ranks,
             reduction operation) {
  constexpr index_t tile = 1024;
  auto* out = static_cast<T*>(out_bytes);
  auto const* pieces = static_cast<T const*>(piece_bytes);
  accumulator_t<T> sum[tile];
  bool exact = true;
  for (index_t begin = 0; begin < n; begin += tile) {
    auto const length = n - begin < tile ? n - begin : tile;
    for (index_t i = 0; i < length; ++i) sum[i] = static_cast<accumulator_t<T>>(pieces[begin + i]);
    for (int r = 1; r < ranks; ++r)
      exact &= combine_into(sum, pieces + r * stride + begin, length, operation);
    for (index_t i = 0; i < length; ++i) out[begin + i] = static_cast<T>(sum[i]);
  }
  return exact;
}

} // namespace tessera::inline TESSERA_ABI::comm::detail

#endif
