/// Normal random numbers by index (core/philox.hpp): out[i] = mean + deviation * normal number first + i of
/// the stream. The same whoever asks, in whatever pieces: how parameters start.
///
///     ops::random_normal(ex, out, {.deviation = 0.02f, .seed = seed, .stream = stream, .first = begin});
///
/// On a device the double-precision functions behind it may differ from the host's in the last place, so that
/// a few of the numbers do once rounded. Cost: one write an element, and some hundred operations.
#ifndef TESSERA_OPS_RANDOM_NORMAL_HPP
#define TESSERA_OPS_RANDOM_NORMAL_HPP

#include <tessera/core/philox.hpp>
#include <tessera/core/scalar.hpp>
#include <tessera/exec/space.hpp>
#include <tessera/ops/shapes.hpp>

namespace tessera::inline TESSERA_ABI::ops {

struct random_normal_options {
  float mean = 0;
  float deviation = 1; ///< 0: every element is the mean.
  std::uint64_t seed = 0;
  std::uint64_t stream = 0; ///< Numbers of different streams have nothing to do with one another.
  index_t first = 0;        ///< The index of out[0] in the stream.
};

/// One implementation a backend: `run(ex, out, options)`.
template <class Backend>
struct random_normal_on;

/// Throws size_error where the view has gaps.
template <exec::space Ex, storage_scalar T>
void random_normal(Ex& ex, view<T, 1, typename Ex::memory> out, random_normal_options const& options,
                   site where = site::here()) {
  require_contiguous("random_normal", "out", out, where);
  random_normal_on<typename Ex::backend>::run(ex, out, options);
}

} // namespace tessera::inline TESSERA_ABI::ops

#include <tessera/ops/host/random_normal.hpp>

#endif
