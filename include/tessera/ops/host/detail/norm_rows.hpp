/// Layer norm and RMS norm on the host are one algorithm: a row is summed, centred (layer norm), scaled and
/// written while it sits in the first-level cache.
#ifndef TESSERA_OPS_HOST_DETAIL_NORM_ROWS_HPP
#define TESSERA_OPS_HOST_DETAIL_NORM_ROWS_HPP

#include <cmath>

#include <tessera/core/scalar.hpp>
#include <tessera/ops/host/detail/loops.hpp>

namespace tessera::inline TESSERA_ABI::ops::host_detail {

/// Centred: subtract the mean and add a bias (layer norm). Otherwise `mean`, `bias` and `d_bias` are not
/// used. R is the storage type of what is normalised and of its gradient, T that of the rest.
template <bool Centred>
struct norm_rows {
  template <exec::host_space Ex, storage_scalar T, storage_scalar R>
  static void forward(Ex& ex, view<T, 2> out, view<R, 2> sums, view<float, 1> mean, view<float, 1> deviation,
                      view<R const, 2> a, view<R const, 2> b, view<T const, 1> gain, view<T const, 1> bias,
                      float epsilon) {
    auto const width = a.extent(1);
    auto const share = 1.0f / static_cast<float>(width > 0 ? width : 1);
    auto const *g = gain.data(), *shift = bias.data();
    for_rows(ex, a.extent(0), width, [=](index_t row) {
      auto const* x = a.data() + row * a.stride(0);
      auto* y = out.data() + row * out.stride(0);
      if (sums.data() != nullptr) {
        auto const* addend = b.data() + row * b.stride(0);
        auto* s = sums.data() + row * sums.stride(0);
        TESSERA_SIMD()
        for (index_t i = 0; i < width; ++i)
          store(s[i], static_cast<float>(x[i]) + static_cast<float>(addend[i]));
        x = s;
      }
      auto centre = 0.0f;
      if constexpr (Centred) {
        centre = sum(width, [=](index_t i) { return static_cast<float>(x[i]); }) * share;
        mean(row) = centre;
      }
      auto const squares = sum(width, [=](index_t i) {
        auto const d = static_cast<float>(x[i]) - centre;
        return d * d;
      });
      auto const r = 1.0f / std::sqrt(squares * share + epsilon);
      deviation(row) = r;
      TESSERA_SIMD()
      for (index_t i = 0; i < width; ++i) {
        auto const scaled = (static_cast<float>(x[i]) - centre) * r * static_cast<float>(g[i]);
        if constexpr (Centred)
          store(y[i], scaled + static_cast<float>(shift[i]));
        else
          store(y[i], scaled);
      }
    });
  }

  /// With h = d_out * gain and n the normalised input:
  ///     d_in = (h - mean(h) - n mean(h n)) / deviation   (without mean(h) where not centred),
  ///     d_gain = sum over rows of d_out n,  d_bias = sum over rows of d_out.
  template <exec::host_space Ex, storage_scalar T, storage_scalar R, storage_scalar G>
  static void backward(Ex& ex, view<R, 2> d_in, view<G, 1> d_gain, view<G, 1> d_bias, view<R const, 2> d_out,
                       view<R const, 2> in, view<float const, 1> mean, view<float const, 1> deviation,
                       view<T const, 1> gain, bool accumulate, bool accumulate_input, site where) {
    auto const rows = in.extent(0), width = in.extent(1);
    auto const share = 1.0f / static_cast<float>(width > 0 ? width : 1);
    // Chunks depend on the row count alone; each has its own partial sums.
    auto const at_least = (rows + max_chunks - 1) / max_chunks;
    auto const chunk = at_least > min_chunk ? at_least : min_chunk;
    auto const chunks = (rows + chunk - 1) / chunk;
    constexpr index_t kinds = Centred ? 2 : 1;
    auto* partial =
        ex.template handle<exec::scratch<norm_rows>>().template take<float>(chunks * kinds * width, where);

    for_rows(ex, chunks, chunk * width, [=](index_t c) {
      auto* gains = partial + c * kinds * width;
      auto* biases = gains + (kinds - 1) * width;
      for (index_t i = 0; i < kinds * width; ++i) gains[i] = 0;
      auto const end = (c + 1) * chunk < rows ? (c + 1) * chunk : rows;
      for (auto row = c * chunk; row < end; ++row) {
        auto const* x = in.data() + row * in.stride(0);
        auto const* dy = d_out.data() + row * d_out.stride(0);
        auto const* g = gain.data();
        auto* dx = d_in.data() + row * d_in.stride(0);
        auto const r = deviation(row);
        auto centre = 0.0f;
        if constexpr (Centred) centre = mean(row);
        // Two sums one after the other: in one loop g++ 12 leaves them scalar, three times slower.
        auto const h_at = [=](index_t i) { return static_cast<float>(dy[i]) * static_cast<float>(g[i]); };
        auto h_mean = 0.0f;
        if constexpr (Centred) h_mean = sum(width, h_at) * share;
        auto const hn_mean =
            sum(width, [=](index_t i) { return h_at(i) * ((static_cast<float>(x[i]) - centre) * r); }) *
            share;
        auto const write = [=](auto old_value) {
          TESSERA_SIMD()
          for (index_t i = 0; i < width; ++i) {
            auto const d = static_cast<float>(dy[i]);
            auto const n = (static_cast<float>(x[i]) - centre) * r;
            gains[i] += d * n;
            if constexpr (Centred) biases[i] += d;
            store(dx[i], old_value(dx[i]) + (d * static_cast<float>(g[i]) - h_mean - n * hn_mean) * r);
          }
        };
        if (accumulate_input)
          write([](R old_value) { return static_cast<float>(old_value); });
        else
          write([](R) { return 0.0f; });
      }
    });

    add_partials(ex, d_gain, partial, chunks, kinds * width, accumulate);
    if constexpr (Centred) add_partials(ex, d_bias, partial + width, chunks, kinds * width, accumulate);
  }

private:
  static constexpr index_t min_chunk = 32, max_chunks = 256;

  template <exec::host_space Ex, storage_scalar G>
  static void add_partials(Ex& ex, view<G, 1> out, float const* partial, index_t chunks, index_t stride,
                           bool accumulate) {
    for_elements(ex, out.size(), [=, g = out.data()](index_t begin, index_t end) {
      float total[block];
      for (; begin < end; begin += block) {
        auto const count = end - begin < block ? end - begin : block;
        for (index_t i = 0; i < count; ++i) total[i] = accumulate ? static_cast<float>(g[begin + i]) : 0.0f;
        for (index_t c = 0; c < chunks; ++c)
          for (index_t i = 0; i < count; ++i) total[i] += partial[c * stride + begin + i];
        for (index_t i = 0; i < count; ++i) store(g[begin + i], total[i]);
      }
    });
  }
};

} // namespace tessera::inline TESSERA_ABI::ops::host_detail

#endif
