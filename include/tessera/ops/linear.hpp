/// A linear layer: out = activation(in weight^T + bias), with PyTorch's orientation of the weight, [out, in].
/// Bias and GELU are applied to the product's sums while they are still at hand, before anything is rounded
/// (on CUDA as far as cuBLASLt does). The output may be stored in another type than input and weight.
///
///     ops::linear(ex, out, in, weight, bias);
///     ops::linear(ex, out, in, weight, bias, {.activation = activation::gelu_tanh, .pre_activation = pre});
///     ops::linear_backward(ex, linear_gradients<T, G>{d_in, d_weight, d_bias}, d_out, in, weight,
///                          {.activation = activation::gelu_tanh, .pre_activation = pre, .scratch = d_pre});
///
/// A layer whose input is the activation of another one can apply that activation's gradient too, while the
/// product's rows are at hand: d_in is then the gradient before the activation, which the other layer's
/// backward takes as the gradient of a plain output.
///
/// The backward may be done in two calls, the input's gradient first and the parameters' at leisure:
///
///     ops::linear_backward(ex, linear_gradients<T, G>{.input = d_in}, d_out, {}, weight,
///                          {.activation = ..., .pre_activation = pre, .scratch = d_pre});
///     ops::linear_backward(ex, linear_gradients<T, G>{{}, d_weight, d_bias}, d_pre, in, {});
///
/// Cost: 2 m n k operations forward, 4 m n k backward, 2 m n k for each of its halves.
#ifndef TESSERA_OPS_LINEAR_HPP
#define TESSERA_OPS_LINEAR_HPP

#include <tessera/ops/gelu.hpp>
#include <tessera/ops/matmul.hpp>

namespace tessera::inline TESSERA_ABI::ops {

enum class activation { none, gelu_tanh, gelu_erf };

template <storage_scalar T, memory_space M = host_memory>
struct linear_options {
  ops::activation activation = activation::none;
  /// [m, n]: receives in weight^T + bias, which the backward of an activation needs. Empty: not kept.
  view<T, 2, M> pre_activation = {};
};

/// Where the gradients go. Empty views are left out.
template <storage_scalar T, storage_scalar G, memory_space M = host_memory>
struct linear_gradients {
  view<T, 2, M> input = {};  ///< [m, k]
  view<G, 2, M> weight = {}; ///< [n, k]
  view<G, 1, M> bias = {};   ///< [n]
};

template <storage_scalar T, memory_space M = host_memory>
struct linear_backward_options {
  bool accumulate = false;       ///< Add to the gradients of weight and bias.
  bool accumulate_input = false; ///< Add to the gradient of the input.
  ops::activation activation = activation::none;
  view<T const, 2, M> pre_activation = {};             ///< [m, n]: what the forward kept.
  ops::activation input_activation = activation::none; ///< What `in` is the result of.
  view<T const, 2, M> input_pre_activation = {};       ///< [m, k]: what `in` is the activation of.
  /// [m, n]: receives the gradient before the activation. May be the memory of d_out. Without one the
  /// execution space keeps a buffer of this size from call to call.
  view<T, 2, M> scratch = {};
};

/// One implementation a backend: `forward(ex, out, in, weight, bias, options, where)`,
/// `backward(ex, gradients, d_out, in, weight, options, where)`.
template <class Backend>
struct linear_on;

namespace detail {

template <class T, memory_space M>
void require_bias(char const* argument, view<T, 1, M> bias, index_t columns, site where) {
  require_extents_or_none("linear", argument, bias, {columns}, where);
  require_contiguous("linear", argument, bias, where);
}

} // namespace detail

/// out[m, n] = activation(in[m, k] weight[n, k]^T + bias[n]); an empty bias adds nothing.
template <exec::space Ex, storage_scalar Out, scalar_input<2, typename Ex::memory> In>
void linear(Ex& ex, view<Out, 2, typename Ex::memory> out, In const& rows,
            input<value_of<In>, 2, typename Ex::memory> weight,
            input<value_of<In>, 1, typename Ex::memory> bias,
            linear_options<value_of<In>, typename Ex::memory> options = {}, site where = site::here()) {
  auto const in = reading<2, typename Ex::memory>(rows);
  auto const m = in.extent(0), k = in.extent(1), n = weight.extent(0);
  require_rows("linear", "out", out, {m, n}, where);
  require_dense_rows("linear", "in", in, where);
  require_rows("linear", "weight", weight, {n, k}, where);
  detail::require_bias("bias", bias, n, where);
  if (options.pre_activation.data() != nullptr)
    require_rows("linear", "pre_activation", options.pre_activation, {m, n}, where);
  if (m > 0 && n > 0) linear_on<typename Ex::backend>::forward(ex, out, in, weight, bias, options, where);
}

/// The gradients of `linear`, given d_out[m, n], the gradient of its output. With an activation,
/// `pre_activation` is required and d_out is turned into the gradient before it first.
/// d_weight (+)= d_out^T in, d_bias (+)= column sums of d_out, d_in (+)= d_out weight; with an
/// input_activation d_in = d_out weight * the slope of that activation at input_pre_activation, and is not
/// added to (E-ops-106). What only a gradient that is left out would read may be left out as well: `in` where
/// d_weight is, `weight` where d_in is.
template <exec::space Ex, storage_scalar T, storage_scalar G>
void linear_backward(Ex& ex, linear_gradients<T, G, typename Ex::memory> gradients,
                     input<T, 2, typename Ex::memory> d_out, input<T, 2, typename Ex::memory> in,
                     input<T, 2, typename Ex::memory> weight,
                     linear_backward_options<T, typename Ex::memory> options = {},
                     site where = site::here()) {
  auto const m = d_out.extent(0), n = d_out.extent(1), k = in.extent(1) > 0 ? in.extent(1) : weight.extent(1);
  auto const require = [where](char const* argument, auto given, extents<2> const& expected, bool needed) {
    if (needed || given.data() != nullptr) require_rows("linear_backward", argument, given, expected, where);
  };
  require_dense_rows("linear_backward", "d_out", d_out, where);
  require("in", in, {m, k}, gradients.weight.data() != nullptr);
  require("weight", weight, {n, k}, gradients.input.data() != nullptr);
  detail::require_bias("the gradient of bias", gradients.bias, n, where);
  if (gradients.input.data() != nullptr)
    require_rows("linear_backward", "the gradient of in", gradients.input, {m, k}, where);
  if (gradients.weight.data() != nullptr)
    require_rows("linear_backward", "the gradient of weight", gradients.weight, {n, k}, where);
  if (options.activation != activation::none)
    require_rows("linear_backward", "pre_activation", options.pre_activation, {m, n}, where);
  if (options.input_activation != activation::none) {
    require_rows("linear_backward", "input_pre_activation", options.input_pre_activation, {m, k}, where);
    if (options.accumulate_input)
      throw config_error("E-ops-106", where,
                         "linear_backward: accumulate_input and input_activation exclude each other: what is "
                         "added to would be gradients of different values");
  }
  if (options.scratch.data() != nullptr)
    require_rows("linear_backward", "scratch", options.scratch, {m, n}, where);
  linear_on<typename Ex::backend>::backward(ex, gradients, d_out, in, weight, options, where);
}

} // namespace tessera::inline TESSERA_ABI::ops

#include <tessera/ops/host/linear.hpp>

#endif
