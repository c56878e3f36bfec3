/// cross_entropy on CUDA: a block takes a row, reads it with a running maximum in every thread (online
/// softmax, Milakov and Gimelshein, 2018), and once more for its gradient, last elements first: those are
/// still in the caches, as the whole row is in the second level's.
#ifndef TESSERA_OPS_CUDA_CROSS_ENTROPY_CUH
#define TESSERA_OPS_CUDA_CROSS_ENTROPY_CUH

#include <cub/block/block_reduce.cuh>

#include <tessera/exec/copy_cuda.hpp>
#include <tessera/exec/pack.cuh>
#include <tessera/exec/scratch.hpp>
#include <tessera/ops/cross_entropy.hpp>
#include <tessera/ops/cuda/detail/faults.cuh>

namespace tessera::inline TESSERA_ABI::ops {

namespace cuda_detail {

/// Takes N more logits into the part.
template <int N>
__device__ __forceinline__ void add_logits(softmax_part& part, float const (&x)[N]) {
  auto higher = part.maximum;
#pragma unroll
  for (int i = 0; i < N; ++i) higher = elementary::larger(higher, x[i]);
  if (higher > part.maximum) {
    part.exponential_sum *= elementary::exp(part.maximum - higher);
    part.maximum = higher;
  }
#pragma unroll
  for (int i = 0; i < N; ++i) {
    part.exponential_sum += elementary::exp(x[i] - part.maximum);
    part.logit_sum += x[i];
  }
}

struct merge_softmax {
  __device__ softmax_part operator()(softmax_part const& a, softmax_part const& b) const {
    return merged(a, b);
  }
};

/// A row cut at the boundaries of 16 bytes: `head` elements, `packs` of N, the rest.
template <storage_scalar T>
struct row_pieces {
  static constexpr int n = exec::pack_size<T>;
  index_t head, packs, single;

  __device__ row_pieces(T const* row, index_t width) {
    auto const past = static_cast<index_t>(reinterpret_cast<std::uintptr_t>(row) % 16 / sizeof(T));
    head = past == 0 ? 0 : static_cast<index_t>(16 / sizeof(T)) - past;
    if (head > width) head = width;
    packs = (width - head) / n;
    single = width - packs * n;
  }
  __device__ index_t pack(index_t p) const { return head + p * n; }
  /// The elements outside packs, counted from 0.
  __device__ index_t element(index_t s) const { return s < head ? s : s + packs * n; }
};

struct loss_and_count {
  double loss = 0, count = 0;
};
struct add_losses {
  __device__ loss_and_count operator()(loss_and_count const& a, loss_and_count const& b) const {
    return {a.loss + b.loss, a.count + b.count};
  }
};

template <storage_scalar T>
__device__ void fill_row(T* x, index_t classes, float value) {
  for (auto i = index_t{threadIdx.x}; i < classes; i += blockDim.x) x[i] = T(value);
}

/// The part of a row that this thread reads, of a block of `Threads`.
template <int Threads, storage_scalar T>
__device__ __forceinline__ softmax_part softmax_of_thread(T const* x, row_pieces<T> const& pieces) {
  softmax_part part;
  for (auto p = index_t{threadIdx.x}; p < pieces.packs; p += Threads) {
    float value[row_pieces<T>::n];
    exec::load_pack(value, x + pieces.pack(p));
    add_logits(part, value);
  }
  for (auto s = index_t{threadIdx.x}; s < pieces.single; s += Threads) {
    float const value[1] = {static_cast<float>(x[pieces.element(s)])};
    add_logits(part, value);
  }
  return part;
}

/// Turns a row of logits into its gradient, last elements first; `target` stands among them, or outside.
template <int Threads, storage_scalar T>
__device__ __forceinline__ void write_slopes(T* x, row_pieces<T> const& pieces, float maximum,
                                             cross_entropy_slope const& g, index_t target) {
  constexpr int n = row_pieces<T>::n;
  auto const elsewhere = [&](float logit) { return elementary::exp(logit - maximum) * g.slope - g.even; };
  for (auto s = index_t{threadIdx.x}; s < pieces.single; s += Threads) {
    auto const i = pieces.element(s);
    auto const value = elsewhere(static_cast<float>(x[i]));
    x[i] = T(i == target ? value - g.target : value);
  }
  for (auto p = pieces.packs - 1 - index_t{threadIdx.x}; p >= 0; p -= Threads) {
    auto const first = pieces.pack(p);
    float value[n];
    exec::load_pack(value, x + first);
#pragma unroll
    for (int i = 0; i < n; ++i) value[i] = elsewhere(value[i]);
    if (auto const at = target - first; at >= 0 && at < n) {
#pragma unroll
      for (int i = 0; i < n; ++i)
        if (i == at) value[i] -= g.target;
    }
    exec::store_pack(x + first, value);
  }
}

template <int Threads, storage_scalar T>
TESSERA_KERNEL void __launch_bounds__(Threads, 1536 / Threads)
    cross_entropy_kernel(T* logits, index_t stride, index_t classes, float* losses,
                         std::int32_t const* targets, cross_entropy_options<cuda_memory> options,
                         fault_flag flag) {
  using reduce = cub::BlockReduce<softmax_part, Threads>;
  __shared__ typename reduce::TempStorage storage;
  __shared__ softmax_row shared_row;
  auto const row = index_t{blockIdx.x};
  auto* x = logits + row * stride;
  auto const target = targets[row];
  auto const is_class = target >= 0 && target < classes;
  if (!is_class) {
    auto const ignored = target == ignore_index;
    constexpr auto not_a_number = std::bit_cast<float>(0x7fc00000u);
    if (threadIdx.x == 0) {
      losses[row] = ignored ? 0.0f : not_a_number;
      if (!ignored) flag.raise(row, target);
    }
    if (options.write_gradient) fill_row(x, classes, ignored ? 0.0f : not_a_number);
    return;
  }

  row_pieces<T> const pieces(x, classes);
  auto const part = reduce(storage).Reduce(softmax_of_thread<Threads>(x, pieces), merge_softmax{});
  if (threadIdx.x == 0) {
    auto const whole = row_of(part, classes, options);
    shared_row = whole;
    losses[row] = cross_entropy_loss(whole, static_cast<float>(x[target]), options);
  }
  if (!options.write_gradient) return;
  __syncthreads();
  write_slopes<Threads>(x, pieces, shared_row.maximum, cross_entropy_slope(shared_row, classes, options),
                        target);
}

inline constexpr int total_threads = 256;

/// totals (+)= {the sum of the losses, the number of rows that are not ignored}, in one block: one order.
template <std::floating_point Loss>
TESSERA_KERNEL void __launch_bounds__(total_threads)
    loss_totals_kernel(double* totals, Loss const* losses, std::int32_t const* targets, index_t rows,
                       bool add) {
  using reduce = cub::BlockReduce<loss_and_count, total_threads>;
  __shared__ typename reduce::TempStorage storage;
  loss_and_count mine;
  for (auto row = index_t{threadIdx.x}; row < rows; row += total_threads) {
    mine.loss += static_cast<double>(losses[row]);
    mine.count += targets[row] != ignore_index ? 1 : 0;
  }
  auto const all = reduce(storage).Reduce(mine, add_losses{});
  if (threadIdx.x != 0) return;
  totals[0] = all.loss + (add ? totals[0] : 0);
  totals[1] = all.count + (add ? totals[1] : 0);
}

/// start(the threads of a block that takes a row of so many classes).
template <class Start>
void with_threads(index_t classes, Start&& start) {
  if (classes <= 4096)
    start(std::integral_constant<int, 128>{});
  else
    start(std::integral_constant<int, 512>{});
}

struct loss_totals {};

/// Adds the losses up, into totals or for the caller, who then waits.
template <exec::cuda_space Ex>
sum_and_count total_of(Ex& ex, view<float, 1, cuda_memory> losses,
                       view<std::int32_t const, 1, cuda_memory> targets, view<double, 1, cuda_memory> totals,
                       site where) {
  auto const waits = totals.empty();
  auto* sums =
      waits ? ex.template handle<exec::scratch<loss_totals, cuda_memory>>().template take<double>(2, where)
            : totals.data();
  exec::launch(ex, {.block = dim3(total_threads), .where = where}, loss_totals_kernel<float>, sums,
               static_cast<float const*>(losses.data()), targets.data(), losses.size(), !waits);
  if (!waits) return {};
  double result[2];
  exec::copy(ex, std::span<double>(result), device_span<double const, cuda_memory>(sums, 2), where);
  return {result[0], result[1]};
}

} // namespace cuda_detail

template <>
struct cross_entropy_on<exec::cuda_backend> {
  template <exec::cuda_space Ex, storage_scalar T>
  static sum_and_count run(Ex& ex, view<T, 2, exec::cuda_memory> logits,
                           view<float, 1, exec::cuda_memory> losses,
                           view<std::int32_t const, 1, exec::cuda_memory> targets,
                           cross_entropy_options<exec::cuda_memory> const& options, site where) {
    using namespace cuda_detail;
    auto const rows = logits.extent(0), classes = logits.extent(1);
    if (rows == 0) return {};
    auto const flag = ex.template handle<faults>().expect(fault::target, classes, where);
    with_threads(classes, [&](auto threads) {
      exec::launch(ex, {.grid = exec::grid_of(rows), .block = dim3(decltype(threads)::value), .where = where},
                   cross_entropy_kernel<decltype(threads)::value, T>, logits.data(), logits.stride(0),
                   classes, losses.data(), targets.data(), options, flag);
    });
    return total_of(ex, losses, targets, options.totals, where);
  }
};

} // namespace tessera::inline TESSERA_ABI::ops

#endif
