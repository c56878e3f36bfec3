/// Rotary position embedding (Su et al., 2021) in the half-split form of Hugging Face's Llama: in each head
/// of D elements, the pair (x_i, x_{i + D/2}) at position p is turned by the angle p * theta^(-2 i / D).
///
///     ops::rotary(ex, q);                        // q [batch, sequence, heads, D], in place
///     ops::rotary(ex, d_q, {.inverse = true});   // backward: turned back
///
/// Any strides but the last, so queries and keys inside a packed projection are turned where they stand.
/// Cost: reads and writes each element once; sines and cosines are computed at first use and kept by the
/// space.
#ifndef TESSERA_OPS_ROTARY_HPP
#define TESSERA_OPS_ROTARY_HPP

#include <tessera/core/scalar.hpp>
#include <tessera/exec/space.hpp>
#include <tessera/ops/shapes.hpp>
#include <tessera/ops/token_positions.hpp>

namespace tessera::inline TESSERA_ABI::ops {

struct rotary_options {
  float theta = 10000;            ///< Base of the wavelengths.
  token_positions positions = {}; ///< Of x(:, t, :, :); when decoding with a cache, they go on behind it.
  bool inverse = false;           ///< Turn back: the gradient of the forward.
};

/// One implementation a backend: `run(ex, x, options, where)`.
template <class Backend>
struct rotary_on;

/// Throws size_error where D is odd, the last stride is not 1, or positions are negative or occur twice;
/// config_error for a theta that is not positive.
template <exec::space Ex, storage_scalar T>
void rotary(Ex& ex, view<T, 4, typename Ex::memory> x, rotary_options options = {},
            site where = site::here()) {
  require_dense_rows("rotary", "x", x, where);
  if (x.extent(3) % 2 != 0)
    throw size_error("E-ops-007", where, "rotary: heads have ", x.extent(3),
                     " elements, need an even number");
  if (!options.positions.fit(x.extent(1), (std::numeric_limits<index_t>::max)()))
    throw size_error("E-ops-008", where, "rotary: the tokens stand at ", options.positions.text(x.extent(1)),
                     ", must count from 0, each position once");
  if (!(options.theta > 0))
    throw config_error("E-ops-009", where, "rotary: theta is ", options.theta, ", must be positive");
  rotary_on<typename Ex::backend>::run(ex, x, options, where);
}

} // namespace tessera::inline TESSERA_ABI::ops

#include <tessera/ops/host/rotary.hpp>

#endif
