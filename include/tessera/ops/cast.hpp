/// Conversion between storage types, rounded to nearest, ties to even; between equal types a copy. Cost: one
/// read and one write an element.
///
///     ops::cast(ex, rounded.view(), exact.view());   // out first
#ifndef TESSERA_OPS_CAST_HPP
#define TESSERA_OPS_CAST_HPP

#include <tessera/core/scalar.hpp>
#include <tessera/exec/space.hpp>
#include <tessera/ops/shapes.hpp>

namespace tessera::inline TESSERA_ABI::ops {

/// One implementation a backend: `run(ex, out, in)`.
template <class Backend>
struct cast_on;

/// Throws size_error where sizes differ or a view has gaps. Between equal types, out may be in.
template <exec::space Ex, storage_scalar To, class From>
  requires storage_scalar<std::remove_const_t<From>>
void cast(Ex& ex, view<To, 1, typename Ex::memory> out, view<From, 1, typename Ex::memory> in,
          site where = site::here()) {
  require_extents("cast", "out", out, in.extents(), where);
  require_contiguous("cast", "out", out, where);
  require_contiguous("cast", "in", in, where);
  cast_on<typename Ex::backend>::run(ex, out,
                                     view<std::remove_const_t<From> const, 1, typename Ex::memory>(in));
}

} // namespace tessera::inline TESSERA_ABI::ops

#include <tessera/ops/host/cast.hpp>

#endif
