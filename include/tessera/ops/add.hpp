/// Element by element addition: out = a + b, in float, rounded once. The output may be the memory of either
/// input. Cost: two reads and a write an element.
///
///     ops::add(ex, out, a, b);
#ifndef TESSERA_OPS_ADD_HPP
#define TESSERA_OPS_ADD_HPP

#include <tessera/core/scalar.hpp>
#include <tessera/exec/space.hpp>
#include <tessera/ops/shapes.hpp>

namespace tessera::inline TESSERA_ABI::ops {

/// One implementation a backend: `run(ex, out, a, b)`.
template <class Backend>
struct add_on;

/// Throws size_error where extents differ or a view has gaps.
template <exec::space Ex, storage_scalar T>
void add(Ex& ex, view<T, 1, typename Ex::memory> out, input<T, 1, typename Ex::memory> a,
         input<T, 1, typename Ex::memory> b, site where = site::here()) {
  require_extents("add", "a", a, out.extents(), where);
  require_extents("add", "b", b, out.extents(), where);
  require_contiguous("add", "out", out, where);
  require_contiguous("add", "a", a, where);
  require_contiguous("add", "b", b, where);
  add_on<typename Ex::backend>::run(ex, out, a, b);
}

} // namespace tessera::inline TESSERA_ABI::ops

#include <tessera/ops/host/add.hpp>

#endif
