/// The Gaussian error linear unit, x * P(normal <= x), exactly (erf) or by GPT-2's tanh formula (Hendrycks
/// and Gimpel, 2016).
///
///     ops::gelu(ex, out, in);
///     ops::gelu_backward(ex, d_in, d_out, in, {.form = ops::gelu_form::erf});
///
/// Element by element; the output may be the input's own memory. Cost: reads and writes each element once.
#ifndef TESSERA_OPS_GELU_HPP
#define TESSERA_OPS_GELU_HPP

#include <tessera/core/scalar.hpp>
#include <tessera/exec/space.hpp>
#include <tessera/ops/elementary.hpp>
#include <tessera/ops/shapes.hpp>

namespace tessera::inline TESSERA_ABI::ops {

enum class gelu_form { tanh, erf };

struct gelu_options {
  gelu_form form = gelu_form::tanh;
};

/// gelu(x). The tanh form is written as x * sigmoid(2 u) with u = sqrt(2 / pi) (x + 0.044715 x^3): the same
/// value, without the cancellation of 1 + tanh(u) for negative u.
template <gelu_form Form>
[[gnu::always_inline]] TESSERA_HOST_DEVICE inline float gelu_value(float x) noexcept {
  if constexpr (Form == gelu_form::tanh)
    return x * elementary::sigmoid(x * (1.59576912f + 0.0713548163f * (x * x)));
  else
    return x * (0.5f + 0.5f * elementary::erf(x * 0.707106781f));
}

/// d gelu(x) / dx.
template <gelu_form Form>
[[gnu::always_inline]] TESSERA_HOST_DEVICE inline float gelu_slope(float x) noexcept {
  // Beyond 12 the slope is 0 or 1; the bound keeps 0 * infinity out.
  x = elementary::smaller(elementary::larger(x, -12.0f), 12.0f);
  if constexpr (Form == gelu_form::tanh) {
    auto const s = elementary::sigmoid(x * (1.59576912f + 0.0713548163f * (x * x)));
    return s + x * s * (1.0f - s) * (1.59576912f + 0.214064449f * (x * x));
  } else {
    auto const density = 0.398942280f * elementary::exp(-0.5f * (x * x));
    return 0.5f + 0.5f * elementary::erf(x * 0.707106781f) + x * density;
  }
}

/// One implementation a backend: `forward(ex, out, in, form)`, `backward(ex, d_in, d_out, in, form)`.
template <class Backend>
struct gelu_on;

/// out = gelu(in). Throws size_error where extents differ or a view has gaps.
template <exec::space Ex, storage_scalar T>
void gelu(Ex& ex, view<T, 1, typename Ex::memory> out, input<T, 1, typename Ex::memory> in,
          gelu_options options = {}, site where = site::here()) {
  require_extents("gelu", "out", out, in.extents(), where);
  require_contiguous("gelu", "out", out, where);
  require_contiguous("gelu", "in", in, where);
  gelu_on<typename Ex::backend>::forward(ex, out, in, options.form);
}

/// d_in = d_out * gelu'(in); `in` is what the forward read. d_in may be d_out.
template <exec::space Ex, storage_scalar T>
void gelu_backward(Ex& ex, view<T, 1, typename Ex::memory> d_in, input<T, 1, typename Ex::memory> d_out,
                   input<T, 1, typename Ex::memory> in, gelu_options options = {},
                   site where = site::here()) {
  require_extents("gelu_backward", "d_in", d_in, in.extents(), where);
  require_extents("gelu_backward", "d_out", d_out, in.extents(), where);
  require_contiguous("gelu_backward", "d_in", d_in, where);
  require_contiguous("gelu_backward", "d_out", d_out, where);
  require_contiguous("gelu_backward", "in", in, where);
  gelu_on<typename Ex::backend>::backward(ex, d_in, d_out, in, options.form);
}

} // namespace tessera::inline TESSERA_ABI::ops

#include <tessera/ops/host/gelu.hpp>

#endif
