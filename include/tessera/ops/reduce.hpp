/// Sums over all elements of a flat view, in double, over fixed chunks added in order: the same bits for any
/// number of threads. Cost: each element is read once.
///
///     double norm = std::sqrt(ops::sum_of_squares(ex, gradients));
///     if (!ops::all_finite(ex, gradients)) ...
#ifndef TESSERA_OPS_REDUCE_HPP
#define TESSERA_OPS_REDUCE_HPP

#include <tessera/core/scalar.hpp>
#include <tessera/exec/space.hpp>
#include <tessera/ops/shapes.hpp>

namespace tessera::inline TESSERA_ABI::ops {

/// What each element adds.
struct value_term {
  [[gnu::always_inline]] TESSERA_HOST_DEVICE double operator()(float x) const noexcept { return x; }
};
struct square_term {
  [[gnu::always_inline]] TESSERA_HOST_DEVICE double operator()(float x) const noexcept {
    return static_cast<double>(x) * static_cast<double>(x);
  }
};
/// 1 for an infinity or NaN, else 0.
struct not_finite_term {
  [[gnu::always_inline]] TESSERA_HOST_DEVICE double operator()(float x) const noexcept {
    return static_cast<double>((std::bit_cast<std::uint32_t>(x) & 0x7f800000u) == 0x7f800000u);
  }
};

/// One implementation a backend: `sum(ex, in, term, where) -> double`.
template <class Backend>
struct reduce_on;

namespace detail {

template <class Term, exec::space Ex, class T>
double reduce(char const* name, Ex& ex, view<T, 1, typename Ex::memory> in, site where) {
  require_contiguous(name, "in", in, where);
  return reduce_on<typename Ex::backend>::sum(
      ex, view<std::remove_const_t<T> const, 1, typename Ex::memory>(in), Term{}, where);
}

} // namespace detail

/// Throws size_error where the view has gaps, as do the others.
template <exec::space Ex, class T>
  requires storage_scalar<std::remove_const_t<T>>
double sum(Ex& ex, view<T, 1, typename Ex::memory> in, site where = site::here()) {
  return detail::reduce<value_term>("sum", ex, in, where);
}

template <exec::space Ex, class T>
  requires storage_scalar<std::remove_const_t<T>>
double sum_of_squares(Ex& ex, view<T, 1, typename Ex::memory> in, site where = site::here()) {
  return detail::reduce<square_term>("sum_of_squares", ex, in, where);
}

/// True where no element is an infinity or NaN.
template <exec::space Ex, class T>
  requires storage_scalar<std::remove_const_t<T>>
bool all_finite(Ex& ex, view<T, 1, typename Ex::memory> in, site where = site::here()) {
  return detail::reduce<not_finite_term>("all_finite", ex, in, where) == 0;
}

} // namespace tessera::inline TESSERA_ABI::ops

#include <tessera/ops/host/reduce.hpp>

#endif
