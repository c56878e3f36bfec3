/// linear on CUDA: one product by cuBLASLt that also adds the bias, applies a GELU or the slope of one, or
/// sums the bias gradient, wherever its rules on addresses allow that; separate kernels elsewhere.
///
/// The GELU inside a product is the tanh form, for 16-bit storage: nothing is said of the accuracy of
/// cuBLASLt's tanh, so fp32 and the erf form go through this library's own formula. An output of another type
/// than the operands is made of sums in fp32, to which the bias is added in fp32. A bias gradient that is
/// added to, and one behind an activation, is summed by a kernel.
#ifndef TESSERA_OPS_CUDA_LINEAR_CUH
#define TESSERA_OPS_CUDA_LINEAR_CUH

#include <tessera/exec/elements.cuh>
#include <tessera/ops/cuda/cast.cuh>
#include <tessera/ops/cuda/detail/column_sums.cuh>
#include <tessera/ops/cuda/matmul.cuh>
#include <tessera/ops/linear.hpp>

namespace tessera::inline TESSERA_ABI::ops {

namespace cuda_detail {

struct plus_bias {
  TESSERA_HOST_DEVICE void operator()(float& y, float sum, float bias) const noexcept { y = sum + bias; }
};
struct unchanged {
  TESSERA_HOST_DEVICE void operator()(float& y, float x) const noexcept { y = x; }
};
template <gelu_form Form>
struct gelu_of {
  TESSERA_HOST_DEVICE void operator()(float& y, float x) const noexcept { y = gelu_value<Form>(x); }
};
/// The slope of the GELU, and the gradient before it.
template <gelu_form Form>
struct slope_of {
  TESSERA_HOST_DEVICE float operator()(float x) const noexcept { return gelu_slope<Form>(x); }
  TESSERA_HOST_DEVICE void operator()(float& d_in, float d_out, float x) const noexcept {
    d_in = d_out * gelu_slope<Form>(x);
  }
};

/// What cuBLASLt asks of a vector or matrix that an epilogue reads or writes.
template <class T>
bool suits_epilogue(view<T, 1, cuda_memory> bias) noexcept {
  return exec::aligned16(bias.data());
}
template <class T>
bool suits_epilogue(view<T, 2, cuda_memory> aux) noexcept {
  return exec::aligned16(aux.data()) && aux.stride(0) % 8 == 0 && aux.stride(0) >= aux.extent(1);
}

} // namespace cuda_detail

template <>
struct linear_on<exec::cuda_backend> {
  template <class T, int Rank>
  using device_view = view<T, Rank, exec::cuda_memory>;

  template <exec::cuda_space Ex, storage_scalar Out, storage_scalar T>
  static void forward(Ex& ex, device_view<Out, 2> out, device_view<T const, 2> in,
                      device_view<T const, 2> weight, device_view<T const, 1> bias,
                      linear_options<T, exec::cuda_memory> const& options, site where) {
    auto const pre = options.pre_activation;
    device_view<T const, 2> const weight_t(weight.data(), {weight.extent(1), weight.extent(0)},
                                           {1, weight.stride(0)});
    if constexpr (std::same_as<Out, T>) {
      if (options.activation == activation::gelu_tanh &&
          gelu_by_product(ex, out, in, weight_t, bias, pre, where))
        return;
      // Product and bias first, where they are kept or else in the output.
      auto const before = pre.empty() ? out : pre;
      product_plus_bias(ex, before, in, weight_t, bias, where);
      activate(ex, out, before, options.activation);
    } else {
      auto const before = fp32_of(ex, out, where);
      product_plus_bias(ex, before, in, weight_t, bias, where);
      if (!pre.empty()) activate(ex, pre, before, activation::none);
      activate(ex, out, before, options.activation);
    }
  }

  template <exec::cuda_space Ex, storage_scalar T, storage_scalar G>
  static void backward(Ex& ex, linear_gradients<T, G, exec::cuda_memory> const& gradients,
                       device_view<T const, 2> d_out, device_view<T const, 2> in,
                       device_view<T const, 2> weight,
                       linear_backward_options<T, exec::cuda_memory> const& options, site where) {
    auto const own_activation = options.activation != activation::none;
    if (own_activation) {
      auto d_pre = options.scratch;
      if (d_pre.data() == nullptr)
        d_pre = {ex.template handle<exec::scratch<linear_on, exec::cuda_memory>>().template take<T>(
                     d_out.size(), where),
                 d_out.extents()};
      if (options.activation == activation::gelu_tanh)
        before_own_activation(ex, gradients.bias, d_pre, d_out, cuda_detail::slope_of<gelu_form::tanh>{},
                              options, where);
      else
        before_own_activation(ex, gradients.bias, d_pre, d_out, cuda_detail::slope_of<gelu_form::erf>{},
                              options, where);
      d_out = d_pre;
    }
    weight_gradient(ex, gradients.weight, own_activation ? device_view<G, 1>() : gradients.bias, d_out, in,
                    options.accumulate, where);
    input_gradient(ex, gradients.input, d_out, weight, options, where);
  }

private:
  using epilogue = cuda_detail::product_epilogue;

  /// out (+)= a b with an epilogue; false where cuBLASLt cannot.
  template <exec::cuda_space Ex, storage_scalar C, storage_scalar T>
  static bool product(Ex& ex, device_view<C, 2> out, device_view<T const, 2> a, device_view<T const, 2> b,
                      epilogue const& then, site where) {
    using cuda_detail::batch_of_one;
    return ex.template handle<cuda_detail::cublaslt>().multiply(ex, batch_of_one(out), batch_of_one(a),
                                                                batch_of_one(b), false, then, where);
  }

  /// out = activation(before); `before` may be `out`.
  template <exec::cuda_space Ex, storage_scalar Out, storage_scalar Before>
  static void activate(Ex& ex, device_view<Out, 2> out, device_view<Before, 2> before,
                       ops::activation activation) {
    auto const pass = [&](auto function) {
      exec::for_elements(ex, out.extent(0), out.extent(1), function, exec::writes(out.data(), out.stride(0)),
                         exec::reads(before.data(), before.stride(0)));
    };
    switch (activation) {
    case activation::none:
      if (static_cast<void*>(out.data()) != before.data()) pass(cuda_detail::unchanged{});
      break;
    case activation::gelu_tanh:
      pass(cuda_detail::gelu_of<gelu_form::tanh>{});
      break;
    case activation::gelu_erf:
      pass(cuda_detail::gelu_of<gelu_form::erf>{});
      break;
    }
  }

  template <exec::cuda_space Ex, storage_scalar T>
  static bool gelu_by_product(Ex& ex, device_view<T, 2> out, device_view<T const, 2> in,
                              device_view<T const, 2> weight_t, device_view<T const, 1> bias,
                              device_view<T, 2> pre, site where) {
    if constexpr (std::same_as<T, float>) {
      return false;
    } else {
      using cuda_detail::suits_epilogue;
      if (!suits_epilogue(bias) || (!pre.empty() && !suits_epilogue(pre))) return false;
      auto kind = static_cast<unsigned>(pre.empty() ? CUBLASLT_EPILOGUE_GELU : CUBLASLT_EPILOGUE_GELU_AUX);
      if (!bias.empty()) kind |= CUBLASLT_EPILOGUE_BIAS;
      epilogue then{static_cast<cublasLtEpilogue_t>(kind), bias.data()};
      if (!pre.empty()) then.aux = pre.data(), then.aux_leading = pre.stride(0);
      return product(ex, out, in, weight_t, then, where);
    }
  }

  /// The output, or scratch of its size where it has fewer bits.
  template <exec::cuda_space Ex, storage_scalar Out>
  static device_view<float, 2> fp32_of(Ex& ex, device_view<Out, 2> out, site where) {
    if constexpr (std::same_as<Out, float>)
      return out;
    else
      return {ex.template handle<exec::scratch<fp32_sums, exec::cuda_memory>>().template take<float>(
                  out.size(), where),
              out.extents()};
  }

  /// The bias in the type of the product's output, as an epilogue reads it.
  template <storage_scalar Out, exec::cuda_space Ex, storage_scalar T>
  static device_view<Out const, 1> bias_as(Ex& ex, device_view<T const, 1> bias, site where) {
    if constexpr (std::same_as<Out, T>) {
      return bias;
    } else {
      device_view<Out, 1> const copy(
          ex.template handle<exec::scratch<bias_copy, exec::cuda_memory>>().template take<Out>(bias.size(),
                                                                                               where),
          bias.extents());
      cast_on<exec::cuda_backend>::run(ex, copy, bias);
      return copy;
    }
  }

  template <exec::cuda_space Ex, storage_scalar Out, storage_scalar T>
  static void product_plus_bias(Ex& ex, device_view<Out, 2> out, device_view<T const, 2> in,
                                device_view<T const, 2> weight_t, device_view<T const, 1> bias, site where) {
    using product_on = matmul_on<exec::cuda_backend>;
    if (bias.empty()) return product_on::run(ex, out, in, weight_t, false, where);
    auto const added = bias_as<Out>(ex, bias, where);
    if (cuda_detail::suits_epilogue(added) &&
        product(ex, out, in, weight_t, {CUBLASLT_EPILOGUE_BIAS, added.data()}, where))
      return;
    // The sum is rounded once, after the bias.
    auto const sums = fp32_of(ex, out, where);
    product_on::run(ex, sums, in, weight_t, false, where);
    exec::for_elements(ex, out.extent(0), out.extent(1), cuda_detail::plus_bias{},
                       exec::writes(out.data(), out.stride(0)), exec::reads(sums.data(), sums.stride(0)),
                       exec::reads(bias.data()));
  }

  /// d_pre = d_out * slope(pre), and the sums of its columns.
  template <exec::cuda_space Ex, storage_scalar T, storage_scalar G, class Slope>
  static void before_own_activation(Ex& ex, device_view<G, 1> bias, device_view<T, 2> d_pre,
                                    device_view<T const, 2> d_out, Slope slope,
                                    linear_backward_options<T, exec::cuda_memory> const& options,
                                    site where) {
    auto const pre = options.pre_activation;
    if (bias.empty())
      exec::for_elements(ex, d_out.extent(0), d_out.extent(1), slope,
                         exec::writes(d_pre.data(), d_pre.stride(0)),
                         exec::reads(d_out.data(), d_out.stride(0)), exec::reads(pre.data(), pre.stride(0)));
    else
      cuda_detail::column_sums(
          ex, bias.data(),
          cuda_detail::column_source<T>{.in = d_out.data(),
                                        .in_stride = d_out.stride(0),
                                        .before = pre.data(),
                                        .before_stride = pre.stride(0),
                                        .out = d_pre.data(),
                                        .out_stride = d_pre.stride(0),
                                        .aligned = aligned(d_out) && aligned(pre) && aligned(d_pre)},
          slope, d_out.extent(0), d_out.extent(1), options.accumulate, where);
  }

  /// d_weight (+)= d_out^T in and d_bias (+)= the columns of d_out, in one call where nothing is added to.
  template <exec::cuda_space Ex, storage_scalar T, storage_scalar G>
  static void weight_gradient(Ex& ex, device_view<G, 2> weight, device_view<G, 1> bias,
                              device_view<T const, 2> d_out, device_view<T const, 2> in, bool accumulate,
                              site where) {
    auto const m = d_out.extent(0), n = d_out.extent(1);
    device_view<T const, 2> const d_out_t(d_out.data(), {n, m}, {1, d_out.stride(0)});
    if constexpr (std::same_as<G, T> || std::same_as<G, float>)
      if (!weight.empty() && !bias.empty() && !accumulate && cuda_detail::suits_epilogue(bias) &&
          product(ex, weight, d_out_t, in, {CUBLASLT_EPILOGUE_BGRADB, bias.data()}, where))
        return;
    if (!bias.empty())
      cuda_detail::column_sums(ex, bias.data(),
                               cuda_detail::column_source<T>{.in = d_out.data(),
                                                             .in_stride = d_out.stride(0),
                                                             .aligned = aligned(d_out)},
                               cuda_detail::no_slope{}, m, n, accumulate, where);
    if (!weight.empty()) matmul_on<exec::cuda_backend>::run(ex, weight, d_out_t, in, accumulate, where);
  }

  /// d_in (+)= d_out weight, or d_in = d_out weight * the slope of the activation that made the input.
  template <exec::cuda_space Ex, storage_scalar T>
  static void input_gradient(Ex& ex, device_view<T, 2> d_in, device_view<T const, 2> d_out,
                             device_view<T const, 2> weight,
                             linear_backward_options<T, exec::cuda_memory> const& options, site where) {
    if (d_in.empty()) return;
    auto const pre = options.input_pre_activation;
    if constexpr (!std::same_as<T, float>)
      if (options.input_activation == activation::gelu_tanh && cuda_detail::suits_epilogue(pre) &&
          product(ex, d_in, d_out, weight, {CUBLASLT_EPILOGUE_DGELU, nullptr, pre.data(), pre.stride(0)},
                  where))
        return;
    matmul_on<exec::cuda_backend>::run(ex, d_in, d_out, weight, options.accumulate_input, where);
    auto const finish = [&](auto slope) {
      exec::for_elements(ex, d_in.extent(0), d_in.extent(1), slope, exec::writes(d_in.data(), d_in.stride(0)),
                         exec::reads(d_in.data(), d_in.stride(0)), exec::reads(pre.data(), pre.stride(0)));
    };
    if (options.input_activation == activation::gelu_tanh) finish(cuda_detail::slope_of<gelu_form::tanh>{});
    if (options.input_activation == activation::gelu_erf) finish(cuda_detail::slope_of<gelu_form::erf>{});
  }

  template <class T>
  static bool aligned(device_view<T, 2> rows) noexcept {
    return exec::aligned16(rows.data(), rows.stride(0));
  }

  struct fp32_sums;
  struct bias_copy;
};

} // namespace tessera::inline TESSERA_ABI::ops

#endif
