/// out = factor * in, in float, rounded once; and filling with one value. Cost: one read and one write an
/// element, or one write.
///
///     ops::scale(ex, out, in, 0.5f);   // out may be in
///     ops::fill(ex, out, 0.0f);
#ifndef TESSERA_OPS_SCALE_HPP
#define TESSERA_OPS_SCALE_HPP

#include <tessera/core/scalar.hpp>
#include <tessera/exec/space.hpp>
#include <tessera/ops/shapes.hpp>

namespace tessera::inline TESSERA_ABI::ops {

/// One implementation a backend: `scale(ex, out, in, factor)`, `fill(ex, out, value)`.
template <class Backend>
struct scale_on;

/// Throws size_error where sizes differ or a view has gaps.
template <exec::space Ex, storage_scalar T>
void scale(Ex& ex, view<T, 1, typename Ex::memory> out, input<T, 1, typename Ex::memory> in, float factor,
           site where = site::here()) {
  require_extents("scale", "out", out, in.extents(), where);
  require_contiguous("scale", "out", out, where);
  require_contiguous("scale", "in", in, where);
  scale_on<typename Ex::backend>::scale(ex, out, in, factor);
}

/// Throws size_error where the view has gaps.
template <exec::space Ex, storage_scalar T>
void fill(Ex& ex, view<T, 1, typename Ex::memory> out, float value, site where = site::here()) {
  require_contiguous("fill", "out", out, where);
  scale_on<typename Ex::backend>::fill(ex, out, value);
}

} // namespace tessera::inline TESSERA_ABI::ops

#include <tessera/ops/host/scale.hpp>

#endif
