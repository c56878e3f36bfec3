/// rotary on CUDA: the host's table of cosines and sines for each (theta, D) that came by, copied to the
/// device once, then one pass. A table that grows cannot do so while a graph is captured: run the operation
/// once before.
#ifndef TESSERA_OPS_CUDA_ROTARY_CUH
#define TESSERA_OPS_CUDA_ROTARY_CUH

#include <vector>

#include <tessera/exec/copy_cuda.hpp>
#include <tessera/exec/launch.cuh>
#include <tessera/exec/pack.cuh>
#include <tessera/ops/detail/rotary_angles.hpp>
#include <tessera/ops/rotary.hpp>

namespace tessera::inline TESSERA_ABI::ops {

namespace cuda_detail {

/// A handle of exec::cuda.
class rotary_tables {
public:
  explicit rotary_tables(memory_account account) noexcept : account_(account) {}

  /// Rows of D / 2 cosines and D / 2 sines for positions [0, positions).
  template <exec::cuda_space Ex>
  float const* of(Ex& ex, float theta, index_t half, index_t positions, site where) {
    auto* known = find(theta, half);
    if (known == nullptr) {
      tables_.push_back({theta, half, {}});
      known = &tables_.back();
    }
    if (positions > known->rows.extent(0)) {
      auto const size = 2 * known->rows.extent(0) > positions ? 2 * known->rows.extent(0) : positions;
      tensor<float, 2> filled({size, 2 * half}, {}, where);
      detail::fill_rotary_table(filled.data(), theta, half, size);
      known->rows = tensor<float, 2, exec::cuda_memory>(filled.extents(), account_, where);
      exec::copy(ex, known->rows.span(), std::span<float const>(filled.span()), where);
    }
    return known->rows.data();
  }

private:
  struct table {
    float theta;
    index_t half;
    tensor<float, 2, exec::cuda_memory> rows;
  };
  table* find(float theta, index_t half) noexcept {
    for (auto& known : tables_)
      if (known.theta == theta && known.half == half) return &known;
    return nullptr;
  }

  memory_account account_;
  std::vector<table> tables_;
};

inline constexpr int rotary_lanes = 32, rotary_tokens = 8;

/// A token is turned by the lanes of a warp, N pairs each at a time.
template <int N, storage_scalar T>
TESSERA_KERNEL void __launch_bounds__(rotary_lanes* rotary_tokens)
    rotary_kernel(view<T, 4, exec::cuda_memory> x, float const* table, token_positions positions,
                  float sign) {
  auto const sequence = x.extent(1), tokens = x.extent(0) * sequence, half = x.extent(3) / 2;
  auto const packs = static_cast<unsigned>(half / N), count = packs * static_cast<unsigned>(x.extent(2));
  for (auto token = index_t{blockIdx.x} * rotary_tokens + threadIdx.y; token < tokens;
       token += index_t{gridDim.x} * rotary_tokens) {
    auto const t = token % sequence;
    auto const* cosines = table + positions(t) * 2 * half;
    auto* at = x.data() + token / sequence * x.stride(0) + t * x.stride(1);
    for (auto i = static_cast<unsigned>(threadIdx.x); i < count; i += rotary_lanes) {
      auto const pair = index_t{i % packs} * N;
      auto* first = at + index_t{i / packs} * x.stride(2) + pair;
      float a[N], b[N], cosine[N], sine[N];
      exec::load_pack(a, first);
      exec::load_pack(b, first + half);
      exec::load_pack(cosine, cosines + pair);
      exec::load_pack(sine, cosines + half + pair);
#pragma unroll
      for (int j = 0; j < N; ++j) detail::rotate(a[j], b[j], cosine[j], sign * sine[j]);
      exec::store_pack(first, a);
      exec::store_pack(first + half, b);
    }
  }
}

} // namespace cuda_detail

template <>
struct rotary_on<exec::cuda_backend> {
  template <exec::cuda_space Ex, storage_scalar T>
  static void run(Ex& ex, view<T, 4, exec::cuda_memory> x, rotary_options const& options, site where) {
    using namespace cuda_detail;
    if (x.empty()) return;
    auto const half = x.extent(3) / 2;
    // One count for both, so that lanes count in 32 bits.
    (void)narrow<std::int32_t>(x.extent(2) * half, where);
    auto const* table = ex.template handle<rotary_tables>().of(ex, options.theta, half,
                                                               options.positions.end(x.extent(1)), where);
    constexpr int n = exec::pack_size<T>;
    auto const whole = half % n == 0 && exec::aligned16(x.data(), x.stride(0)) &&
                       exec::aligned16(x.data(), x.stride(1)) && exec::aligned16(x.data(), x.stride(2));
    exec::launch(ex,
                 {.grid = exec::grid_for(ex, x.extent(0) * x.extent(1), rotary_tokens),
                  .block = dim3(rotary_lanes, rotary_tokens),
                  .where = where},
                 whole ? rotary_kernel<n, T> : rotary_kernel<1, T>, x, table, options.positions,
                 options.inverse ? -1.0f : 1.0f);
  }
};

} // namespace tessera::inline TESSERA_ABI::ops

#endif
