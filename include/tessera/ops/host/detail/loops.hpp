/// How the host's memory-bound operations share work: loops over elements and over rows, and sums whose order
/// is fixed. Neither the result of a loop nor that of a sum depends on the number of threads, on addresses or
/// on the width of vector registers.
#ifndef TESSERA_OPS_HOST_DETAIL_LOOPS_HPP
#define TESSERA_OPS_HOST_DETAIL_LOOPS_HPP

#include <tessera/exec/host.hpp>
#include <tessera/exec/scratch.hpp>
#include <tessera/ops/elementary.hpp>

namespace tessera::inline TESSERA_ABI::ops::host_detail {

/// Elements that are worth a thread of their own: about 10 microseconds of memory traffic.
inline constexpr index_t grain = 16384;
/// Borders between threads lie at multiples of this many elements, so that which elements end up in a vector
/// loop's scalar remainder (where a compiler may round differently) is the same for any number of threads.
inline constexpr index_t block = 256;

/// Calls body(begin, end) on ranges of [0, count).
template <exec::host_space Ex, class Body>
void for_elements(Ex& ex, index_t count, Body&& body) {
  ex.parallel_for((count + block - 1) / block, grain / block, [&](index_t first, index_t last) {
    body(first * block, last * block < count ? last * block : count);
  });
}

/// Calls body(row) for each of `rows` rows of `width` elements.
template <exec::host_space Ex, class Body>
void for_rows(Ex& ex, index_t rows, index_t width, Body&& body) {
  ex.parallel_for(rows, grain / (width + 1) + 1, [&](index_t first, index_t last) {
    for (auto row = first; row < last; ++row) body(row);
  });
}

/// Sixteen running sums, added up pairwise at the end.
inline constexpr int lanes = 16;

template <std::floating_point Sum>
Sum sum_of_lanes(Sum const (&lane)[lanes]) noexcept {
  Sum sum[lanes];
  for (int l = 0; l < lanes; ++l) sum[l] = lane[l];
  for (int half = lanes / 2; half > 0; half /= 2)
    for (int l = 0; l < half; ++l) sum[l] += sum[l + half];
  return sum[0];
}

/// Sum of term(i) over [0, n): element i goes to running sum i % lanes.
template <std::floating_point Sum = float, class Term>
[[gnu::always_inline]] inline Sum sum(index_t n, Term&& term) {
  Sum lane[lanes] = {};
  index_t i = 0;
  for (; i + lanes <= n; i += lanes)
    for (int l = 0; l < lanes; ++l) lane[l] += term(i + l);
  for (int l = 0; i < n; ++i, ++l) lane[l] += term(i);
  return sum_of_lanes(lane);
}

/// The largest value(i) of [0, n), NaN left out; minus infinity for none.
template <class Value>
[[gnu::always_inline]] inline float maximum(index_t n, Value&& value) {
  float lane[lanes];
  for (auto& l : lane) l = -std::numeric_limits<float>::infinity();
  index_t i = 0;
  for (; i + lanes <= n; i += lanes)
    for (int l = 0; l < lanes; ++l) lane[l] = elementary::larger(lane[l], value(i + l));
  for (int l = 0; i < n; ++i, ++l) lane[l] = elementary::larger(lane[l], value(i));
  for (int half = lanes / 2; half > 0; half /= 2)
    for (int l = 0; l < half; ++l) lane[l] = elementary::larger(lane[l], lane[l + half]);
  return lane[0];
}

} // namespace tessera::inline TESSERA_ABI::ops::host_detail

#endif
