/// A linear layer and the gated unit behind it in one call (ops/linear.hpp, ops/swiglu.hpp):
///     gate_up = in weight^T,   out = gate * sigmoid(gate) * up,   with the rows of gate_up = (gate, up).
///
///     ops::linear_swiglu(ex, out, gate_up, in, weight);    // out [m, f], gate_up [m, 2 f], weight [2 f, k]
///
/// On the host the unit is applied to the product's sums before gate_up, which a backward needs, is rounded,
/// and while they are in cache. On CUDA it reads gate_up as it is stored.
///
/// Cost: 4 m f k operations, and the traffic of writing gate_up and out.
#ifndef TESSERA_OPS_LINEAR_SWIGLU_HPP
#define TESSERA_OPS_LINEAR_SWIGLU_HPP

#include <tessera/ops/matmul.hpp>
#include <tessera/ops/swiglu.hpp>

namespace tessera::inline TESSERA_ABI::ops {

/// One implementation a backend: `run(ex, out, gate_up, in, weight, where)`, the weight transposed.
template <class Backend>
struct linear_swiglu_on;

/// Throws size_error where shapes do not fit.
template <exec::space Ex, storage_scalar T>
void linear_swiglu(Ex& ex, view<T, 2, typename Ex::memory> out,
                   std::type_identity_t<view<T, 2, typename Ex::memory>> gate_up,
                   input<T, 2, typename Ex::memory> in, input<T, 2, typename Ex::memory> weight,
                   site where = site::here()) {
  auto const m = in.extent(0), k = in.extent(1), f = out.extent(1);
  require_rows("linear_swiglu", "out", out, {m, f}, where);
  require_rows("linear_swiglu", "gate_up", gate_up, {m, 2 * f}, where);
  require_dense_rows("linear_swiglu", "in", in, where);
  require_rows("linear_swiglu", "weight", weight, {2 * f, k}, where);
  if (out.empty()) return;
  linear_swiglu_on<typename Ex::backend>::run(
      ex, out, gate_up, in,
      view<T const, 2, typename Ex::memory>(weight.data(), {k, 2 * f}, {1, weight.stride(0)}), where);
}

} // namespace tessera::inline TESSERA_ABI::ops

#include <tessera/ops/host/linear_swiglu.hpp>

#endif
