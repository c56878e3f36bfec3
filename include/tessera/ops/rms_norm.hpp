/// Root mean square normalisation (Zhang and Sennrich, 2019) over the last dimension:
///     out = x / sqrt(mean(x^2) + epsilon) * gain.
///
///     ops::rms_norm(ex, out, reciprocal_deviation, in, gain);
///     ops::residual_rms_norm(ex, out, sum, reciprocal_deviation, a, b, gain);
///     ops::rms_norm_backward(ex, d_in, d_gain, d_out, in, reciprocal_deviation, gain);
///
/// What holds for ops/layer_norm.hpp (rows, aliases, types, cost, determinism) holds here.
#ifndef TESSERA_OPS_RMS_NORM_HPP
#define TESSERA_OPS_RMS_NORM_HPP

#include <tessera/ops/layer_norm.hpp>

namespace tessera::inline TESSERA_ABI::ops {

/// One implementation a backend: as layer_norm_on, without mean and bias.
template <class Backend>
struct rms_norm_on;

/// in, out [rows, width]; reciprocal_deviation [rows] is kept for the backward. Throws size_error.
template <exec::space Ex, storage_scalar T, scalar_input<2, typename Ex::memory> In>
void rms_norm(Ex& ex, view<T, 2, typename Ex::memory> out,
              std::type_identity_t<view<float, 1, typename Ex::memory>> reciprocal_deviation, In const& rows,
              input<T, 1, typename Ex::memory> gain, norm_options options = {}, site where = site::here()) {
  constexpr auto name = "rms_norm";
  auto const in = reading<2, typename Ex::memory>(rows);
  require_rows(name, "out", out, in.extents(), where);
  require_dense_rows(name, "in", in, where);
  require_rows(name, "reciprocal_deviation", reciprocal_deviation, {in.extent(0)}, where);
  require_rows(name, "gain", gain, {in.extent(1)}, where);
  rms_norm_on<typename Ex::backend>::forward(
      ex, out, view<value_of<In>, 2, typename Ex::memory>{}, reciprocal_deviation, in,
      view<value_of<In> const, 2, typename Ex::memory>{}, gain, options.epsilon);
}

/// sum = a + b, out = rms_norm(sum), in one pass. `sum` may be the memory of a or b.
template <exec::space Ex, storage_scalar T, storage_scalar R>
void residual_rms_norm(Ex& ex, view<T, 2, typename Ex::memory> out, view<R, 2, typename Ex::memory> sum,
                       std::type_identity_t<view<float, 1, typename Ex::memory>> reciprocal_deviation,
                       input<R, 2, typename Ex::memory> a, input<R, 2, typename Ex::memory> b,
                       input<T, 1, typename Ex::memory> gain, norm_options options = {},
                       site where = site::here()) {
  constexpr auto name = "residual_rms_norm";
  require_rows(name, "out", out, a.extents(), where);
  require_rows(name, "sum", sum, a.extents(), where);
  require_dense_rows(name, "a", a, where);
  require_rows(name, "b", b, a.extents(), where);
  require_rows(name, "reciprocal_deviation", reciprocal_deviation, {a.extent(0)}, where);
  require_rows(name, "gain", gain, {a.extent(1)}, where);
  rms_norm_on<typename Ex::backend>::forward(ex, out, sum, reciprocal_deviation, a, b, gain, options.epsilon);
}

/// `in` and `reciprocal_deviation` as the forward read and wrote them (for the residual form, in = sum).
template <exec::space Ex, storage_scalar R, storage_scalar G, scalar_input<1, typename Ex::memory> Gain>
void rms_norm_backward(Ex& ex, view<R, 2, typename Ex::memory> d_in, view<G, 1, typename Ex::memory> d_gain,
                       input<R, 2, typename Ex::memory> d_out, input<R, 2, typename Ex::memory> in,
                       input<float, 1, typename Ex::memory> reciprocal_deviation, Gain const& gains,
                       norm_backward_options options = {}, site where = site::here()) {
  constexpr auto name = "rms_norm_backward";
  auto const gain = reading<1, typename Ex::memory>(gains);
  require_rows(name, "d_in", d_in, in.extents(), where);
  require_rows(name, "d_gain", d_gain, {in.extent(1)}, where);
  require_rows(name, "d_out", d_out, in.extents(), where);
  require_dense_rows(name, "in", in, where);
  require_rows(name, "reciprocal_deviation", reciprocal_deviation, {in.extent(0)}, where);
  require_rows(name, "gain", gain, {in.extent(1)}, where);
  rms_norm_on<typename Ex::backend>::backward(ex, d_in, d_gain, d_out, in, reciprocal_deviation, gain,
                                              options, where);
}

} // namespace tessera::inline TESSERA_ABI::ops

#include <tessera/ops/host/rms_norm.hpp>

#endif
