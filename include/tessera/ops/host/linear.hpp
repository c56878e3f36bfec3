/// linear on the host: the product by the space's policy over blocks of rows, and bias and activation on each
/// block while it is in cache.
#ifndef TESSERA_OPS_HOST_LINEAR_HPP
#define TESSERA_OPS_HOST_LINEAR_HPP

#include <tessera/ops/host/detail/convert.hpp>
#include <tessera/ops/host/detail/loops.hpp>
#include <tessera/ops/host/detail/product_blocks.hpp>
#include <tessera/ops/host/matmul.hpp>
#include <tessera/ops/linear.hpp>

namespace tessera::inline TESSERA_ABI::ops {

template <>
struct linear_on<exec::host_backend> {
  template <exec::host_space Ex, storage_scalar Out, storage_scalar T>
  static void forward(Ex& ex, view<Out, 2> out, view<T const, 2> in, view<T const, 2> weight,
                      view<T const, 1> bias, linear_options<T> const& options, site) {
    auto const m = out.extent(0), n = out.extent(1);
    auto const pre = options.pre_activation;
    view<T const, 2> const weight_t{weight.data(), {weight.extent(1), n}, {1, weight.stride(0)}};
    auto const plain = options.activation == activation::none;
    if (plain && bias.empty() && pre.empty())
      return matmul_on<exec::host_backend>::run(ex, out, in, weight_t, false);

    auto const block = host_detail::block_rows(n);
    for (index_t row = 0; row < m; row += block) {
      auto const end = std::min(m, row + block);
      auto const part = out.slice(0, row, end);
      auto const sums = host_detail::sums_of(ex, part);
      matmul_on<exec::host_backend>::run(ex, sums, in.slice(0, row, end), weight_t, false);
      auto const kept = pre.empty() ? pre : pre.slice(0, row, end);
      switch (options.activation) {
      case activation::none:
        finish(ex, part, kept, sums, bias, [](float x) { return x; });
        break;
      case activation::gelu_tanh:
        finish(ex, part, kept, sums, bias, [](float x) { return gelu_value<gelu_form::tanh>(x); });
        break;
      case activation::gelu_erf:
        finish(ex, part, kept, sums, bias, [](float x) { return gelu_value<gelu_form::erf>(x); });
        break;
      }
    }
  }

  template <exec::host_space Ex, storage_scalar T, storage_scalar G>
  static void backward(Ex& ex, linear_gradients<T, G> const& gradients, view<T const, 2> d_out,
                       view<T const, 2> in, view<T const, 2> weight,
                       linear_backward_options<T> const& options, site where) {
    auto const m = d_out.extent(0), n = d_out.extent(1);
    if (options.activation != activation::none) {
      auto d_pre = options.scratch;
      if (d_pre.data() == nullptr)
        d_pre = {ex.template handle<exec::scratch<linear_on>>().template take<T>(m * n, where), {m, n}};
      if (options.activation == activation::gelu_tanh)
        columns(ex, gradients.bias, options.accumulate, d_out, d_pre, options.pre_activation,
                [](float x) { return gelu_slope<gelu_form::tanh>(x); });
      else
        columns(ex, gradients.bias, options.accumulate, d_out, d_pre, options.pre_activation,
                [](float x) { return gelu_slope<gelu_form::erf>(x); });
      d_out = d_pre;
    } else if (!gradients.bias.empty()) {
      columns(ex, gradients.bias, options.accumulate, d_out, view<T, 2>{}, d_out, [](float) { return 1.0f; });
    }
    if (!gradients.weight.empty())
      matmul_on<exec::host_backend>::run(ex, gradients.weight,
                                         view<T const, 2>{d_out.data(), {n, m}, {1, d_out.stride(0)}}, in,
                                         options.accumulate);
    if (gradients.input.empty()) return;
    if (options.input_activation == activation::gelu_tanh)
      before_activation(ex, gradients.input, d_out, weight, options.input_pre_activation,
                        [](float x) { return gelu_slope<gelu_form::tanh>(x); });
    else if (options.input_activation == activation::gelu_erf)
      before_activation(ex, gradients.input, d_out, weight, options.input_pre_activation,
                        [](float x) { return gelu_slope<gelu_form::erf>(x); });
    else
      matmul_on<exec::host_backend>::run(ex, gradients.input, d_out, weight, options.accumulate_input);
  }

private:
  /// kept = sums + bias, out = f(sums + bias). `sums` may be `out`.
  template <exec::host_space Ex, storage_scalar Out, storage_scalar T, class F>
  static void finish(Ex& ex, view<Out, 2> out, view<T, 2> kept, view<float const, 2> sums,
                     view<T const, 1> bias, F f) {
    auto const n = out.extent(1);
    host_detail::for_rows(ex, out.extent(0), n, [&](index_t row) {
      auto const* sum = &sums(row, 0);
      auto* y = &out(row, 0);
      auto const* b = bias.data();
      auto const pass = [&](auto has_bias, auto keeps, T* pre) {
        TESSERA_SIMD()
        for (index_t i = 0; i < n; ++i) {
          auto value = sum[i];
          if constexpr (has_bias) value += host_detail::widened(b[i]);
          if constexpr (keeps) pre[i] = T(value);
          y[i] = Out(f(value));
        }
      };
      if (kept.empty())
        bias.empty() ? pass(std::false_type{}, std::false_type{}, nullptr)
                     : pass(std::true_type{}, std::false_type{}, nullptr);
      else
        bias.empty() ? pass(std::false_type{}, std::true_type{}, &kept(row, 0))
                     : pass(std::true_type{}, std::true_type{}, &kept(row, 0));
    });
  }

  /// d_in = d_out weight * slope(pre), block by block of rows.
  template <exec::host_space Ex, storage_scalar T, class Slope>
  static void before_activation(Ex& ex, view<T, 2> d_in, view<T const, 2> d_out, view<T const, 2> weight,
                                view<T const, 2> pre, Slope slope) {
    auto const m = d_in.extent(0), k = d_in.extent(1), block = host_detail::block_rows(k);
    for (index_t row = 0; row < m; row += block) {
      auto const end = std::min(m, row + block);
      auto const part = d_in.slice(0, row, end);
      auto const sums = host_detail::sums_of(ex, part);
      matmul_on<exec::host_backend>::run(ex, sums, d_out.slice(0, row, end), weight, false);
      host_detail::for_rows(ex, end - row, k, [&](index_t r) {
        auto const* sum = &sums(r, 0);
        auto const* x = &pre(row + r, 0);
        auto* dx = &part(r, 0);
        TESSERA_SIMD()
        for (index_t i = 0; i < k; ++i) dx[i] = T(sum[i] * slope(host_detail::widened(x[i])));
      });
    }
  }

  /// One pass over d_out: d_pre = d_out * slope(pre), and the sums of its columns into bias. Each column is
  /// added up by one thread, in chunks of rows.
  template <exec::host_space Ex, storage_scalar T, storage_scalar G, class Slope>
  static void columns(Ex& ex, view<G, 1> bias, bool accumulate, view<T const, 2> d_out, view<T, 2> d_pre,
                      view<T const, 2> pre, Slope slope) {
    constexpr index_t width = 256, chunk = 32;
    auto const m = d_out.extent(0), n = d_out.extent(1);
    auto const blocks = (n + width - 1) / width;
    ex.parallel_for(blocks, host_detail::grain / (m * width + 1) + 1, [&](index_t first, index_t last) {
      for (auto block = first; block < last; ++block) {
        auto const column = block * width;
        auto const count = std::min(width, n - column);
        float total[width] = {};
        for (index_t row = 0; row < m; row += chunk) {
          float part[width] = {};
          for (auto r = row; r < std::min(m, row + chunk); ++r) {
            auto const* dy = &d_out(r, column);
            if (d_pre.data() == nullptr) {
              for (index_t i = 0; i < count; ++i) part[i] += host_detail::widened(dy[i]);
            } else {
              auto const* x = &pre(r, column);
              auto* dx = &d_pre(r, column);
              TESSERA_SIMD()
              for (index_t i = 0; i < count; ++i) {
                auto const value = host_detail::widened(dy[i]) * slope(host_detail::widened(x[i]));
                dx[i] = T(value);
                part[i] += value;
              }
            }
          }
          for (index_t i = 0; i < count; ++i) total[i] += part[i];
        }
        for (index_t i = 0; i < count && !bias.empty(); ++i)
          bias(column + i) = G(total[i] + (accumulate ? float(bias(column + i)) : 0.0f));
      }
    });
  }
};

} // namespace tessera::inline TESSERA_ABI::ops

#endif
