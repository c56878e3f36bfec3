/// Layer norm and RMS norm on CUDA are one algorithm. A row up to 16384 elements is read once and stays in
/// registers until it is written; the backward keeps rows up to 8192 elements, and the sums for gain and bias
/// of the rows that a block goes through (half as many where rows do not allow accesses of 16 bytes). Longer
/// rows are read again for each sum (from the second-level cache as a rule) and their sums for gain and bias
/// stand in scratch memory meanwhile.
#ifndef TESSERA_OPS_CUDA_DETAIL_NORM_ROWS_CUH
#define TESSERA_OPS_CUDA_DETAIL_NORM_ROWS_CUH

#include <algorithm>

#include <tessera/exec/scratch.hpp>
#include <tessera/ops/cuda/detail/partial_sums.cuh>
#include <tessera/ops/cuda/detail/rows.cuh>

namespace tessera::inline TESSERA_ABI::ops::cuda_detail {

/// R is the storage type of what is normalised and of its gradient, T that of the rest.
template <storage_scalar T, storage_scalar R>
struct norm_forward {
  row_array<T> out;
  row_array<R> sums; ///< It and `b` are empty where there is no residual.
  row_array<R const> a, b;
  T const *gain, *bias;
  float *mean, *deviation;
  index_t rows;
  int width;
  float share, epsilon; ///< 1 / width
};

/// Elements of a row that a thread keeps: forward 32, backward two numbers for each of 16, and two sums; half
/// as many where accesses are single elements, since each has its address.
constexpr int forward_share(int n) noexcept {
  return n == 1 ? 16 : 32;
}
constexpr int backward_share(int n) noexcept {
  return n == 1 ? 8 : 16;
}

template <bool Centred, int N, storage_scalar T, storage_scalar R>
TESSERA_KERNEL void __launch_bounds__(most_row_threads) norm_forward_kernel(norm_forward<T, R> const p) {
  constexpr int packs = forward_share(N) / N;
  auto const row = index_t{blockIdx.x} * blockDim.y + threadIdx.y;
  if (row >= p.rows) return; // a whole group, which is one warp where a block has several
  auto const width = p.width, stretch = packs * N * int(blockDim.x);
  auto const held = width <= stretch;

  float x[packs][N];
  // The first reading adds the residual and stores the sum, which any further one reads.
  auto const read = [&](int begin, bool first) {
    auto const with_residual = p.sums.data != nullptr;
    auto const a =
        read_packs<N, packs, R>(with_residual && !first ? p.sums.row(row) : p.a.row(row), begin, width);
    for (int k = 0; k < packs; ++k)
      for (int e = 0; e < N; ++e) x[k][e] = a(k, e);
    if (!with_residual || !first) return;
    auto const b = read_packs<N, packs>(p.b.row(row), begin, width);
    for_packs<N, packs>(begin, width, [&](int k, int i) {
      for (int e = 0; e < N; ++e) x[k][e] = R(x[k][e] + b(k, e)); // rounded as stored
      exec::store_pack(p.sums.row(row) + i, x[k]);
    });
  };
  float sum[1] = {};
  auto centre = 0.0f;
  if (Centred) {
    for (int begin = 0; begin < width; begin += stretch) {
      read(begin, true);
      for_packs<N, packs>(begin, width, [&](int k, int) {
        for (int e = 0; e < N; ++e) sum[0] += x[k][e];
      });
    }
    sum_over_group(sum);
    centre = sum[0] * p.share;
    sum[0] = 0;
  }
  for (int begin = 0; begin < width; begin += stretch) {
    if (!Centred || !held) read(begin, !Centred);
    for_packs<N, packs>(begin, width, [&](int k, int) {
      for (int e = 0; e < N; ++e) sum[0] += (x[k][e] - centre) * (x[k][e] - centre);
    });
  }
  sum_over_group(sum);
  auto const r = 1.0f / sqrtf(sum[0] * p.share + p.epsilon);
  if (threadIdx.x == 0) {
    if (Centred) p.mean[row] = centre;
    p.deviation[row] = r;
  }
  for (int begin = 0; begin < width; begin += stretch) {
    if (!held) read(begin, false);
    for_packs<N, packs>(begin, width, [&](int k, int i) {
      float gain[N], bias[N] = {};
      exec::load_pack(gain, p.gain + i);
      if (Centred) exec::load_pack(bias, p.bias + i);
      for (int e = 0; e < N; ++e) x[k][e] = (x[k][e] - centre) * r * gain[e] + bias[e];
      exec::store_pack(p.out.row(row) + i, x[k]);
    });
  }
}

template <storage_scalar T, storage_scalar R>
struct norm_backward {
  row_array<R> d_in;
  row_array<R const> d_out, in;
  T const* gain;
  float const *mean, *deviation;
  float* partial; ///< For each block a row of d_gain, and one of d_bias where centred.
  index_t rows, rows_per_block;
  int width;
  float share;
  bool accumulate_input;
};

/// With h = d_out * gain and n the normalised input:
///     d_in = (h - mean(h) - n mean(h n)) / deviation   (without mean(h) where not centred),
///     d_gain = sum over rows of d_out n,  d_bias = sum over rows of d_out.
template <bool Centred, int N, storage_scalar T, storage_scalar R>
TESSERA_KERNEL void __launch_bounds__(most_row_threads) norm_backward_kernel(norm_backward<T, R> const p) {
  constexpr int packs = backward_share(N) / N, kinds = Centred ? 2 : 1;
  auto const width = p.width, stretch = packs * N * int(blockDim.x);
  auto const held = width <= stretch;
  auto* const partial = p.partial + index_t{blockIdx.x} * kinds * width;

  row_packs<N, packs, R> dy;
  float x[packs][N], sums[kinds][packs][N] = {}; // x: normalised
  if (!held)
    for (int i = int(threadIdx.x); i < kinds * width; i += int(blockDim.x)) partial[i] = 0;

  auto const first_row = index_t{blockIdx.x} * p.rows_per_block;
  auto const end = (std::min)(first_row + p.rows_per_block, p.rows);
  // All groups take part in each round, since they meet in sum_over_group; in the last some find no row.
  for (auto round = first_row; round < end; round += blockDim.y) {
    auto const row = round + threadIdx.y;
    auto const here = row < end ? width : 0;
    auto const r = here > 0 ? p.deviation[row] : 0.0f;
    auto const centre = Centred && here > 0 ? p.mean[row] : 0.0f;
    auto const read = [&](int begin) {
      dy = read_packs<N, packs>(p.d_out.row(row), begin, here);
      auto const in = read_packs<N, packs>(p.in.row(row), begin, here);
      for (int k = 0; k < packs; ++k)
        for (int e = 0; e < N; ++e) x[k][e] = (in(k, e) - centre) * r;
    };
    float means[kinds] = {}; // of h n, and of h
    for (int begin = 0; begin < width; begin += stretch) {
      read(begin);
      for_packs<N, packs>(begin, here, [&](int k, int i) {
        float gain[N];
        exec::load_pack(gain, p.gain + i);
        for (int e = 0; e < N; ++e) {
          auto const h = dy(k, e) * gain[e];
          means[0] += h * x[k][e];
          if (Centred) means[kinds - 1] += h;
        }
      });
    }
    sum_over_group(means);
    auto const hn_mean = means[0] * p.share, h_mean = Centred ? means[kinds - 1] * p.share : 0.0f;

    for (int begin = 0; begin < width; begin += stretch) {
      if (!held) read(begin);
      for_packs<N, packs>(begin, here, [&](int k, int i) {
        float gain[N], d[N] = {};
        exec::load_pack(gain, p.gain + i);
        if (p.accumulate_input) exec::load_pack(d, p.d_in.row(row) + i);
        for (int e = 0; e < N; ++e) {
          sums[0][k][e] += dy(k, e) * x[k][e];
          if (Centred) sums[kinds - 1][k][e] += dy(k, e);
          d[e] += (dy(k, e) * gain[e] - h_mean - x[k][e] * hn_mean) * r;
        }
        exec::store_pack(p.d_in.row(row) + i, d);
        if (!held)
          for (int kind = 0; kind < kinds; ++kind)
            for (int e = 0; e < N; ++e) {
              partial[kind * width + i + e] += sums[kind][k][e];
              sums[kind][k][e] = 0;
            }
      });
    }
  }

  // The groups' sums, one group after the other: each adds to what the one before left in shared memory.
  if (!held) return;
  auto* const so_far = exec::dynamic_shared<float>();
  for (unsigned group = 0; group < blockDim.y; ++group) {
    if (threadIdx.y == group)
      for_packs<N, packs>(0, width, [&](int k, int i) {
        for (int kind = 0; kind < kinds; ++kind)
          for (int e = 0; e < N; ++e) {
            auto const at = kind * width + i + e;
            auto const total = sums[kind][k][e] + (group > 0 ? so_far[at] : 0.0f);
            (group + 1 < blockDim.y ? so_far : partial)[at] = total;
          }
      });
    __syncthreads();
  }
}

/// Centred: subtract the mean and add a bias (layer norm). Otherwise `mean`, `bias` and `d_bias` are not
/// used.
template <bool Centred>
struct norm_rows {
  template <exec::cuda_space Ex, storage_scalar T, storage_scalar R, memory_space M = typename Ex::memory>
  static void forward(Ex& ex, view<T, 2, M> out, view<R, 2, M> sums, view<float, 1, M> mean,
                      view<float, 1, M> deviation, view<R const, 2, M> a, view<R const, 2, M> b,
                      view<T const, 1, M> gain, view<T const, 1, M> bias, float epsilon) {
    auto const rows = a.extent(0), width = a.extent(1);
    norm_forward<T, R> const p{.out = out,
                               .sums = sums,
                               .a = a,
                               .b = b,
                               .gain = gain.data(),
                               .bias = bias.data(),
                               .mean = mean.data(),
                               .deviation = deviation.data(),
                               .rows = rows,
                               .width = narrow<int>(width),
                               .share = 1.0f / static_cast<float>((std::max)(width, index_t{1})),
                               .epsilon = epsilon};
    constexpr int wide = exec::pack_size<T, R>;
    auto const aligned = width % wide == 0 && p.out.aligned() && p.sums.aligned() && p.a.aligned() &&
                         p.b.aligned() && exec::aligned16(p.gain) && exec::aligned16(p.bias);
    auto const across = row_threads(width, forward_share(aligned ? wide : 1));
    auto const down = across == 32 ? index_t{4} : index_t{1};
    exec::launch(ex, {.grid = exec::grid_of((rows + down - 1) / down), .block = exec::grid_of(across, down)},
                 aligned ? norm_forward_kernel<Centred, wide, T, R> : norm_forward_kernel<Centred, 1, T, R>,
                 p);
  }

  template <exec::cuda_space Ex, storage_scalar T, storage_scalar R, storage_scalar G,
            memory_space M = typename Ex::memory>
  static void backward(Ex& ex, view<R, 2, M> d_in, view<G, 1, M> d_gain, view<G, 1, M> d_bias,
                       view<R const, 2, M> d_out, view<R const, 2, M> in, view<float const, 1, M> mean,
                       view<float const, 1, M> deviation, view<T const, 1, M> gain, bool accumulate,
                       bool accumulate_input, site where) {
    constexpr int kinds = Centred ? 2 : 1;
    auto const rows = in.extent(0), width = in.extent(1);
    constexpr int wide = exec::pack_size<T, R>;
    auto const aligned = width % wide == 0 && row_array(d_in).aligned() && row_array(d_out).aligned() &&
                         row_array(in).aligned() && exec::aligned16(gain.data());
    auto const across = row_threads(width, backward_share(aligned ? wide : 1));
    auto const down = (std::max)(index_t{256} / across, index_t{1});
    // A number of blocks that does not depend on the device: nor does the order of the sums.
    auto const rounds = (rows + down - 1) / down;
    auto const rows_per_block = (rounds + most_blocks - 1) / most_blocks * down;
    auto const blocks = rows > 0 ? (rows + rows_per_block - 1) / rows_per_block : 0;
    auto& scratch = ex.template handle<exec::scratch<norm_rows, M>>();
    auto* partial = scratch.template take<float>(blocks * kinds * width, where);

    norm_backward<T, R> const p{.d_in = d_in,
                                .d_out = d_out,
                                .in = in,
                                .gain = gain.data(),
                                .mean = mean.data(),
                                .deviation = deviation.data(),
                                .partial = partial,
                                .rows = rows,
                                .rows_per_block = rows_per_block,
                                .width = narrow<int>(width),
                                .share = 1.0f / static_cast<float>((std::max)(width, index_t{1})),
                                .accumulate_input = accumulate_input};
    exec::launch(ex,
                 {.grid = exec::grid_of(blocks),
                  .block = exec::grid_of(across, down),
                  .shared_bytes = down > 1 ? static_cast<std::size_t>(kinds * width) * sizeof(float) : 0,
                  .where = where},
                 aligned ? norm_backward_kernel<Centred, wide, T, R> : norm_backward_kernel<Centred, 1, T, R>,
                 p);

    partial_outputs<G, kinds> outputs{{d_gain.data()}};
    if constexpr (Centred) outputs.out[1] = d_bias.data();
    add_partials(ex, outputs, partial, blocks, width, accumulate, where);
  }

private:
  static constexpr index_t most_blocks = 256;
};

} // namespace tessera::inline TESSERA_ABI::ops::cuda_detail

#endif
