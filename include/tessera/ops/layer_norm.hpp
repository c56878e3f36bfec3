/// Layer normalisation (Ba, Kiros and Hinton, 2016) over the last dimension:
///     out = (x - mean(x)) / sqrt(variance(x) + epsilon) * gain + bias.
///
///     ops::layer_norm(ex, out, mean, reciprocal_deviation, in, gain, bias);
///     ops::residual_layer_norm(ex, out, sum, mean, reciprocal_deviation, a, b, gain, bias);
///     ops::layer_norm_backward(ex, d_in, d_gain, d_bias, d_out, in, mean, reciprocal_deviation, gain);
///
/// Rows may lie apart; out may be in (of one type), d_in may be d_out. Cost: forward reads and writes each
/// element once (with the residual: two reads, two writes), backward reads two and writes one. The gradients
/// of gain and bias are summed over fixed chunks of rows in order: the same bits for any number of threads.
/// What is normalised, and its gradient, may be stored in another type than gain, bias and output: a residual
/// stream in fp32 between products of 16-bit operands.
#ifndef TESSERA_OPS_LAYER_NORM_HPP
#define TESSERA_OPS_LAYER_NORM_HPP

#include <tessera/core/scalar.hpp>
#include <tessera/exec/space.hpp>
#include <tessera/ops/shapes.hpp>

namespace tessera::inline TESSERA_ABI::ops {

struct norm_options {
  float epsilon = 1e-5f;
};

struct norm_backward_options {
  bool accumulate = false;       ///< Add to the gradients of the parameters instead of overwriting them.
  bool accumulate_input = false; ///< Add to d_in instead of overwriting it.
};

/// One implementation a backend: `forward(ex, out, sum, mean, reciprocal_deviation, a, b, gain, bias,
/// epsilon)` with sum and b empty where there is no residual, and `backward(ex, d_in, d_gain, d_bias, d_out,
/// in, mean, reciprocal_deviation, gain, options, where)`.
template <class Backend>
struct layer_norm_on;

/// in, out [rows, width]; mean and reciprocal_deviation [rows] are kept for the backward. Throws size_error.
template <exec::space Ex, storage_scalar T, scalar_input<2, typename Ex::memory> In>
void layer_norm(Ex& ex, view<T, 2, typename Ex::memory> out,
                std::type_identity_t<view<float, 1, typename Ex::memory>> mean,
                std::type_identity_t<view<float, 1, typename Ex::memory>> reciprocal_deviation,
                In const& rows, input<T, 1, typename Ex::memory> gain, input<T, 1, typename Ex::memory> bias,
                norm_options options = {}, site where = site::here()) {
  constexpr auto name = "layer_norm";
  auto const in = reading<2, typename Ex::memory>(rows);
  require_rows(name, "out", out, in.extents(), where);
  require_dense_rows(name, "in", in, where);
  require_rows(name, "mean", mean, {in.extent(0)}, where);
  require_rows(name, "reciprocal_deviation", reciprocal_deviation, {in.extent(0)}, where);
  require_rows(name, "gain", gain, {in.extent(1)}, where);
  require_rows(name, "bias", bias, {in.extent(1)}, where);
  layer_norm_on<typename Ex::backend>::forward(
      ex, out, view<value_of<In>, 2, typename Ex::memory>{}, mean, reciprocal_deviation, in,
      view<value_of<In> const, 2, typename Ex::memory>{}, gain, bias, options.epsilon);
}

/// sum = a + b, out = layer_norm(sum), in one pass. `sum` may be the memory of a or b.
template <exec::space Ex, storage_scalar T, storage_scalar R>
void residual_layer_norm(Ex& ex, view<T, 2, typename Ex::memory> out, view<R, 2, typename Ex::memory> sum,
                         std::type_identity_t<view<float, 1, typename Ex::memory>> mean,
                         std::type_identity_t<view<float, 1, typename Ex::memory>> reciprocal_deviation,
                         input<R, 2, typename Ex::memory> a, input<R, 2, typename Ex::memory> b,
                         input<T, 1, typename Ex::memory> gain, input<T, 1, typename Ex::memory> bias,
                         norm_options options = {}, site where = site::here()) {
  constexpr auto name = "residual_layer_norm";
  require_rows(name, "out", out, a.extents(), where);
  require_rows(name, "sum", sum, a.extents(), where);
  require_dense_rows(name, "a", a, where);
  require_rows(name, "b", b, a.extents(), where);
  require_rows(name, "mean", mean, {a.extent(0)}, where);
  require_rows(name, "reciprocal_deviation", reciprocal_deviation, {a.extent(0)}, where);
  require_rows(name, "gain", gain, {a.extent(1)}, where);
  require_rows(name, "bias", bias, {a.extent(1)}, where);
  layer_norm_on<typename Ex::backend>::forward(ex, out, sum, mean, reciprocal_deviation, a, b, gain, bias,
                                               options.epsilon);
}

/// `in`, `mean` and `reciprocal_deviation` as the forward read and wrote them (for the residual form, in =
/// sum). d_in [rows, width], d_gain and d_bias [width].
template <exec::space Ex, storage_scalar R, storage_scalar G, scalar_input<1, typename Ex::memory> Gain>
void layer_norm_backward(Ex& ex, view<R, 2, typename Ex::memory> d_in, view<G, 1, typename Ex::memory> d_gain,
                         std::type_identity_t<view<G, 1, typename Ex::memory>> d_bias,
                         input<R, 2, typename Ex::memory> d_out, input<R, 2, typename Ex::memory> in,
                         input<float, 1, typename Ex::memory> mean,
                         input<float, 1, typename Ex::memory> reciprocal_deviation, Gain const& gains,
                         norm_backward_options options = {}, site where = site::here()) {
  constexpr auto name = "layer_norm_backward";
  auto const gain = reading<1, typename Ex::memory>(gains);
  require_rows(name, "d_in", d_in, in.extents(), where);
  require_rows(name, "d_gain", d_gain, {in.extent(1)}, where);
  require_rows(name, "d_bias", d_bias, {in.extent(1)}, where);
  require_rows(name, "d_out", d_out, in.extents(), where);
  require_dense_rows(name, "in", in, where);
  require_rows(name, "mean", mean, {in.extent(0)}, where);
  require_rows(name, "reciprocal_deviation", reciprocal_deviation, {in.extent(0)}, where);
  require_rows(name, "gain", gain, {in.extent(1)}, where);
  layer_norm_on<typename Ex::backend>::backward(ex, d_in, d_gain, d_bias, d_out, in, mean,
                                                reciprocal_deviation, gain, options, where);
}

} // namespace tessera::inline TESSERA_ABI::ops

#include <tessera/ops/host/layer_norm.hpp>

#endif
