/// The gated unit of Llama's feed-forward layers (Shazeer, "GLU variants improve transformer", 2020):
///     out = gate * sigmoid(gate) * up,   with the rows of gate_up = (gate, up).
///
///     ops::swiglu(ex, out, gate_up);                    // out [rows, f], gate_up [rows, 2 f]
///     ops::swiglu_backward(ex, d_gate_up, d_out, gate_up);
///
/// Rows may lie apart; d_gate_up may be gate_up. Cost: reads 2 f and writes f elements a row, backward reads
/// 3 f and writes 2 f.
#ifndef TESSERA_OPS_SWIGLU_HPP
#define TESSERA_OPS_SWIGLU_HPP

#include <tessera/core/scalar.hpp>
#include <tessera/exec/space.hpp>
#include <tessera/ops/elementary.hpp>
#include <tessera/ops/shapes.hpp>

namespace tessera::inline TESSERA_ABI::ops {

/// x * sigmoid(x), the "SiLU" or "swish".
[[gnu::always_inline]] TESSERA_HOST_DEVICE inline float silu_value(float x) noexcept {
  return x * elementary::sigmoid(x);
}

struct silu_parts {
  float value, slope;
};
/// The value and its derivative, which share the sigmoid. Beyond 100 both take their limits.
[[gnu::always_inline]] TESSERA_HOST_DEVICE inline silu_parts silu_with_slope(float x) noexcept {
  auto const s = elementary::sigmoid(x);
  auto const bounded = elementary::smaller(elementary::larger(x, -100.0f), 100.0f);
  return {x * s, s + bounded * s * (1.0f - s)};
}

/// One implementation a backend: `forward(ex, out, gate_up)`, `backward(ex, d_gate_up, d_out, gate_up)`.
template <class Backend>
struct swiglu_on;

/// Throws size_error where shapes do not fit.
template <exec::space Ex, storage_scalar T>
void swiglu(Ex& ex, view<T, 2, typename Ex::memory> out, input<T, 2, typename Ex::memory> gate_up,
            site where = site::here()) {
  require_rows("swiglu", "gate_up", gate_up, {out.extent(0), 2 * out.extent(1)}, where);
  require_dense_rows("swiglu", "out", out, where);
  swiglu_on<typename Ex::backend>::forward(ex, out, gate_up);
}

/// `gate_up` is what the forward read.
template <exec::space Ex, storage_scalar T>
void swiglu_backward(Ex& ex, view<T, 2, typename Ex::memory> d_gate_up,
                     input<T, 2, typename Ex::memory> d_out, input<T, 2, typename Ex::memory> gate_up,
                     site where = site::here()) {
  require_rows("swiglu_backward", "gate_up", gate_up, {d_out.extent(0), 2 * d_out.extent(1)}, where);
  require_rows("swiglu_backward", "d_gate_up", d_gate_up, gate_up.extents(), where);
  require_dense_rows("swiglu_backward", "d_out", d_out, where);
  swiglu_on<typename Ex::backend>::backward(ex, d_gate_up, d_out, gate_up);
}

} // namespace tessera::inline TESSERA_ABI::ops

#include <tessera/ops/host/swiglu.hpp>

#endif
