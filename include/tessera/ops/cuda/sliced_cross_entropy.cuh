/// sliced_cross_entropy on CUDA: the passes of cross_entropy, a block for a row, with a pause between them;
/// parts are merged by a thread a row.
#ifndef TESSERA_OPS_CUDA_SLICED_CROSS_ENTROPY_CUH
#define TESSERA_OPS_CUDA_SLICED_CROSS_ENTROPY_CUH

#include <tessera/ops/cuda/cross_entropy.cuh>
#include <tessera/ops/sliced_cross_entropy.hpp>

namespace tessera::inline TESSERA_ABI::ops {

namespace cuda_detail {

template <int Threads, storage_scalar T>
TESSERA_KERNEL void __launch_bounds__(Threads, 1536 / Threads)
    softmax_statistics_kernel(float* statistics, T const* logits, index_t stride, std::int32_t const* targets,
                              detail::vocabulary_slice slice, fault_flag flag) {
  using reduce = cub::BlockReduce<softmax_part, Threads>;
  __shared__ typename reduce::TempStorage storage;
  auto const row = index_t{blockIdx.x};
  auto const* x = logits + row * stride;
  auto const target = targets[row];
  softmax_statistics_row result;
  if (slice.known(target)) {
    row_pieces<T> const pieces(x, slice.size);
    result.part = reduce(storage).Reduce(softmax_of_thread<Threads>(x, pieces), merge_softmax{});
    if (auto const at = slice.place_of(target); at >= 0) result.target_logit = static_cast<float>(x[at]);
  }
  if (threadIdx.x != 0) return;
  if (!slice.known(target) && target != ignore_index) flag.raise(row, target);
  result.write(statistics + row * softmax_statistics_row::width);
}

inline constexpr int merge_threads = 256;

template <std::floating_point Float>
TESSERA_KERNEL void __launch_bounds__(merge_threads)
    merge_statistics_kernel(Float* merged, Float const* parts, index_t ranks, index_t rows) {
  constexpr auto width = softmax_statistics_row::width;
  auto const row = index_t{blockIdx.x} * merge_threads + threadIdx.x;
  if (row < rows) merged_row(parts + row * width, ranks, rows * width).write(merged + row * width);
}

template <int Threads, storage_scalar T>
TESSERA_KERNEL void __launch_bounds__(Threads, 1536 / Threads)
    cross_entropy_of_kernel(T* logits, index_t stride, float* losses, std::int32_t const* targets,
                            float const* statistics, detail::vocabulary_slice slice,
                            cross_entropy_options<cuda_memory> options, fault_flag flag) {
  auto const row = index_t{blockIdx.x};
  auto* x = logits + row * stride;
  auto const target = targets[row];
  if (!slice.known(target)) {
    auto const ignored = target == ignore_index;
    constexpr auto not_a_number = std::bit_cast<float>(0x7fc00000u);
    if (threadIdx.x == 0) {
      losses[row] = ignored ? 0.0f : not_a_number;
      if (!ignored) flag.raise(row, target);
    }
    if (options.write_gradient) fill_row(x, slice.size, ignored ? 0.0f : not_a_number);
    return;
  }
  auto const all = softmax_statistics_row::read(statistics + row * softmax_statistics_row::width);
  auto const softmax = row_of(all.part, slice.vocabulary, options);
  if (threadIdx.x == 0) losses[row] = cross_entropy_loss(softmax, all.target_logit, options);
  if (options.write_gradient)
    write_slopes<Threads>(x, row_pieces<T>(x, slice.size), softmax.maximum,
                          cross_entropy_slope(softmax, slice.vocabulary, options), slice.place_of(target));
}

} // namespace cuda_detail

template <>
struct sliced_cross_entropy_on<exec::cuda_backend> {
  template <class T, int Rank>
  using device_view = view<T, Rank, exec::cuda_memory>;

  template <exec::cuda_space Ex, storage_scalar T>
  static void statistics(Ex& ex, device_view<float, 2> statistics, device_view<T const, 2> logits,
                         device_view<std::int32_t const, 1> targets, detail::vocabulary_slice slice,
                         site where) {
    using namespace cuda_detail;
    auto const rows = logits.extent(0);
    if (rows == 0) return;
    auto const flag = ex.template handle<faults>().expect(fault::target, slice.vocabulary, where);
    with_threads(slice.size, [&](auto threads) {
      exec::launch(ex, {.grid = exec::grid_of(rows), .block = dim3(decltype(threads)::value), .where = where},
                   softmax_statistics_kernel<decltype(threads)::value, T>, statistics.data(), logits.data(),
                   logits.stride(0), targets.data(), slice, flag);
    });
  }

  template <exec::cuda_space Ex>
  static void merge(Ex& ex, device_view<float, 2> merged, device_view<float const, 3> parts, site where) {
    using namespace cuda_detail;
    auto const rows = merged.extent(0);
    if (rows == 0) return;
    exec::launch(ex,
                 {.grid = exec::grid_of((rows + merge_threads - 1) / merge_threads),
                  .block = dim3(merge_threads),
                  .where = where},
                 merge_statistics_kernel<float>, merged.data(), parts.data(), parts.extent(0), rows);
  }

  template <exec::cuda_space Ex, storage_scalar T>
  static sum_and_count finish(Ex& ex, device_view<T, 2> logits, device_view<float, 1> losses,
                              device_view<std::int32_t const, 1> targets,
                              device_view<float const, 2> statistics, detail::vocabulary_slice slice,
                              cross_entropy_options<exec::cuda_memory> const& options, site where) {
    using namespace cuda_detail;
    auto const rows = logits.extent(0);
    if (rows == 0) return {};
    auto const flag = ex.template handle<faults>().expect(fault::target, slice.vocabulary, where);
    with_threads(slice.size, [&](auto threads) {
      exec::launch(ex, {.grid = exec::grid_of(rows), .block = dim3(decltype(threads)::value), .where = where},
                   cross_entropy_of_kernel<decltype(threads)::value, T>, logits.data(), logits.stride(0),
                   losses.data(), targets.data(), statistics.data(), slice, options, flag);
    });
    return total_of(ex, losses, targets, options.totals, where);
  }
};

} // namespace tessera::inline TESSERA_ABI::ops

#endif
