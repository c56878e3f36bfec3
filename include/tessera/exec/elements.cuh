/// Element by element kernels in one line: a function of one element, and the arrays that it writes and
/// reads.
///
///     struct doubled {
///       TESSERA_HOST_DEVICE void operator()(float& y, float x) const noexcept { y = 2.0f * x; }
///     };
///     exec::for_elements(ex, n, doubled{}, exec::writes(out), exec::reads(in));          // n elements
///     exec::for_elements(ex, rows, width, doubled{}, exec::writes(out, out_stride), exec::reads(in,
///     in_stride));
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
template <int N, storage_scalar T, array_use Use>
struct element_place {
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

/// How a row is cut: `head` elements, `packs` whole packs of N that are aligned in all arrays, the rest.
struct element_plan {
  index_t rows, width, head, packs;
};

inline constexpr int element_threads = 256;

template <int N, class Function, storage_scalar... T, array_use... Use>
TESSERA_KERNEL void __launch_bounds__(element_threads)
    element_kernel(element_plan plan, Function function, element_array<T, Use>... array) {
  auto const thread = index_t{blockIdx.x} * blockDim.x + threadIdx.x,
             threads = index_t{gridDim.x} * blockDim.x;
  auto const single = plan.width - plan.packs * N;
  for (auto row = index_t{blockIdx.y} * blockDim.y + threadIdx.y; row < plan.rows;
       row += index_t{gridDim.y} * blockDim.y) {
    for (auto p = thread; p < plan.packs; p += threads) {
      auto const i = plan.head + p * N;
      call<N>(function, row * plan.width + i, element_place<N, T, Use>(array, row, i)...);
    }
    for (auto s = thread; s < single; s += threads) {
      auto const i = s < plan.head ? s : s + plan.packs * N;
      call<1>(function, row * plan.width + i, element_place<1, T, Use>(array, row, i)...);
    }
  }
}

/// The head after which every row of every array is aligned, or -1.
template <int N, class... Array>
index_t common_head(index_t rows, Array const&... array) {
  if (!((rows == 1 || array.stride * index_t{sizeof(typename Array::value_type)} % 16 == 0) && ...))
    return -1;
  for (index_t head = 0; head < N; ++head)
    if ((is_aligned16(array.data + head) && ...)) return head;
  return -1;
}

} // namespace detail

/// Applies `function` to each of `rows` rows of `width` elements.
template <cuda_space Ex, class Function, storage_scalar... T, array_use... Use>
void for_elements(Ex& ex, index_t rows, index_t width, Function const& function,
                  element_array<T, Use>... array) {
  if (rows <= 0 || width <= 0) return;
  if (((array.stride == width) && ...)) width *= rows, rows = 1; // no gaps: one long row
  constexpr int n = pack_size<T...>;
  auto const head = detail::common_head<n>(rows, array...);
  detail::element_plan const plan{.rows = rows,
                                  .width = width,
                                  .head = head > 0 ? head : 0,
                                  .packs = head < 0 || head > width ? 0 : (width - head) / n};
  auto const single = width - plan.packs * n;
  auto const work = plan.packs > single ? plan.packs : single;
  index_t across = 32; // threads along a row; short rows share a block
  while (across < detail::element_threads && across < work) across *= 2;
  auto const down = detail::element_threads / across < rows ? detail::element_threads / across : rows;
  launch(ex,
         {.grid = grid_of((work + across - 1) / across, (rows + down - 1) / down),
          .block = dim3(narrow<unsigned>(across), narrow<unsigned>(down))},
         detail::element_kernel<n, Function, element_array<T, Use>...>, plan, function, array...);
}

/// Applies `function` to each of `count` elements.
template <cuda_space Ex, class Function, storage_scalar... T, array_use... Use>
void for_elements(Ex& ex, index_t count, Function const& function, element_array<T, Use>... array) {
  for_elements(ex, 1, count, function, array...);
}

} // namespace tessera::inline TESSERA_ABI::exec

#endif
