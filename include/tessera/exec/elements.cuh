/// Element by element kernels in one line: a function of one element, and the arrays that it writes and
/// reads.
///
///     struct doubled {
///       TESSERA_HOST_DEVICE void operator()(float& y, float x) const noexcept { y = 2.0f * x; }
///     };
///     exec::for_elements(ex, n, doubled{}, exec::writes(out), exec::reads(in));
///     exec::for_elements(ex, rows, width, doubled{}, exec::writes(out, stride), exec::reads(in, stride));
///
/// Arithmetic is in float whatever the arrays store. Each array is read once, written once, or (`updates`)
/// both, in accesses of 16 bytes wherever all of them can be: rows may begin anywhere as long as they begin
/// at the same distance from such a boundary; otherwise element by element. Arrays may be one another, or be
/// disjoint.
///
/// A function that wants the elements' numbers takes a whole pack: `f(first, float (&y)[N], float (&x)[N])`
/// for elements first .. first + N - 1 (counted row by row), any N.
#ifndef TESSERA_EXEC_ELEMENTS_CUH
#define TESSERA_EXEC_ELEMENTS_CUH

#include <algorithm>

#include <tessera/exec/launch.cuh>
#include <tessera/exec/pack.cuh>

namespace tessera::inline TESSERA_ABI::exec {

enum class array_use { read, write, update };

/// An array and what a kernel does with it. `stride`: elements from row to row.
template <storage_scalar T, array_use Use>
struct element_array {
  using value_type = T;
  T* data;
  index_t stride;
};

namespace detail {
template <class>
inline constexpr bool is_element_array = false;
template <storage_scalar T, array_use Use>
inline constexpr bool is_element_array<element_array<T, Use>> = true;
} // namespace detail

/// What `writes`, `reads` and `updates` make.
template <class A>
concept array_of_elements = detail::is_element_array<A>;

template <storage_scalar T>
constexpr element_array<T, array_use::write> writes(T* data, index_t stride = 0) noexcept {
  return {data, stride};
}
template <storage_scalar T>
constexpr element_array<T, array_use::update> updates(T* data, index_t stride = 0) noexcept {
  return {data, stride};
}
/// Kernels do not write through it.
template <storage_scalar T>
constexpr element_array<T, array_use::read> reads(T const* data, index_t stride = 0) noexcept {
  return {const_cast<T*>(data), stride};
}

namespace detail {

/// N elements of one array in registers, from when they are read until they are written.
template <int N, class Array>
struct element_place;
template <int N, storage_scalar T, array_use Use>
struct element_place<N, element_array<T, Use>> {
  T* at;
  float value[N];

  __device__ __forceinline__ element_place(element_array<T, Use> array, index_t row, index_t column)
      : at(array.data + row * array.stride + column) {
    if constexpr (Use != array_use::write) load_pack(value, at);
  }
  __device__ __forceinline__ void finish() const {
    if constexpr (Use != array_use::read) store_pack(at, value);
  }
};

template <int N, class Function, class... Place>
__device__ __forceinline__ void call(Function const& function, index_t first, Place... place) {
  if constexpr (std::is_invocable_v<Function const&, index_t, decltype((place.value))...>) {
    function(first, place.value...);
  } else {
#pragma unroll
    for (int i = 0; i < N; ++i) function(place.value[i]...);
  }
  (place.finish(), ...);
}

/// How each row is cut: `head` elements, `packs` whole packs of N that are aligned in all arrays, the rest.
struct element_plan {
  index_t rows, width, head, packs;
};

inline constexpr int element_threads = 256;

template <int N, class Function, class... Array>
TESSERA_KERNEL void __launch_bounds__(element_threads)
    element_kernel(element_plan plan, __grid_constant__ Function const function, Array... array) {
  auto const first = index_t{blockIdx.x} * blockDim.x + threadIdx.x;
  auto const threads = index_t{gridDim.x} * blockDim.x;
  auto const single = plan.width - plan.packs * N;
  for (auto row = index_t{blockIdx.y} * blockDim.y + threadIdx.y; row < plan.rows;
       row += index_t{gridDim.y} * blockDim.y) {
#pragma unroll 1 // one turn, but for the largest arrays
    for (auto p = first; p < plan.packs; p += threads) {
      auto const i = plan.head + p * N;
      call<N>(function, row * plan.width + i, element_place<N, Array>(array, row, i)...);
    }
#pragma unroll 1
    for (auto s = first; s < single; s += threads) {
      auto const i = s < plan.head ? s : s + plan.packs * N;
      call<1>(function, row * plan.width + i, element_place<1, Array>(array, row, i)...);
    }
  }
}

/// The head after which every row of every array is aligned, or -1.
template <int N, class... Array>
index_t common_head(index_t rows, Array const&... array) {
  for (index_t head = 0; head < N; ++head)
    if ((aligned16(array.data + head, rows > 1 ? array.stride : 0) && ...)) return head;
  return -1;
}

} // namespace detail

/// Applies `function` to each of `rows` rows of `width` elements.
template <cuda_space Ex, class Function, array_of_elements... Array>
void for_elements(Ex& ex, index_t rows, index_t width, Function const& function, Array... array) {
  if (rows <= 0 || width <= 0) return;
  if (((array.stride == width) && ...)) width *= rows, rows = 1; // no gaps: one long row
  constexpr int n = pack_size<typename Array::value_type...>;
  auto const head = detail::common_head<n>(rows, array...);
  detail::element_plan const plan{.rows = rows,
                                  .width = width,
                                  .head = head > 0 ? head : 0,
                                  .packs = head < 0 || head > width ? 0 : (width - head) / n};
  auto const work = (std::max)(plan.packs, width - plan.packs * n);
  index_t across = 32; // threads along a row; short rows share a block
  while (across < detail::element_threads && across < work) across *= 2;
  auto const down = (std::min)(detail::element_threads / across, rows);
  constexpr index_t most_across = index_t{1} << 20, most_down = 65535; // the kernel loops over the rest
  launch(ex,
         {.grid = grid_of((std::min)((work + across - 1) / across, most_across),
                          (std::min)((rows + down - 1) / down, most_down)),
          .block = grid_of(across, down)},
         detail::element_kernel<n, Function, Array...>, plan, function, array...);
}

/// Applies `function` to each of `count` elements.
template <cuda_space Ex, class Function, array_of_elements... Array>
void for_elements(Ex& ex, index_t count, Function const& function, Array... array) {
  for_elements(ex, 1, count, function, array...);
}

} // namespace tessera::inline TESSERA_ABI::exec

#endif
