/// Arithmetic on partitioned tensors, where it is right: on equal placements, element by element, without
/// communication. Summands that have not been added yet take part in what is linear and in nothing else:
///
///     add(ex, sums, sums, more_sums);         // partial + partial
///     scale(ex, sums, sums, 0.5f);
///     add_constant(ex, values, values, 1.0f); // not of partial: the constant would be added once a rank
///     pointwise([&](auto out, auto in) { ops::gelu(ex, out, in); }, values, values);
///
/// A value and a summand do not add up (replicate + partial), nor do values that will differ in their
/// gradients (replicate + invariant): redistribute one of them first.
#ifndef TESSERA_PARTITION_ARITHMETIC_HPP
#define TESSERA_PARTITION_ARITHMETIC_HPP

#include <tessera/exec/scratch.hpp>
#include <tessera/ops/add.hpp>
#include <tessera/ops/scale.hpp>
#include <tessera/partition/partitioned_tensor.hpp>

namespace tessera::inline TESSERA_ABI::partition {

namespace detail {
template <class X>
inline constexpr partitioning parts_of = view_t<X>::parts;

constexpr bool has_partial(partitioning const& parts, bool sums_count) noexcept {
  for (int i = 0; i < parts.size; ++i)
    if (parts.at[i].sums() && (sums_count || parts.at[i].operation != comm::reduction::sum)) return true;
  return false;
}
} // namespace detail

/// The same elements on every rank, and gradients of the same kind.
template <class A, class B>
concept same_partition =
    partitioned_array<A> && partitioned_array<B> && std::same_as<detail::value_t<A>, detail::value_t<B>> &&
    std::same_as<detail::memory_t<A>, detail::memory_t<B>> &&
    detail::view_t<A>::rank == detail::view_t<B>::rank&& detail::parts_of<A> == detail::parts_of<B>;

/// Each rank has the values themselves, or its part of them: anything may be done to them.
template <class X>
concept summands_added = partitioned_array<X> && !detail::has_partial(detail::parts_of<X>, true);

/// What is not added yet are sums: linear operations go through.
template <class X>
concept linear_in_summands = partitioned_array<X> && !detail::has_partial(detail::parts_of<X>, false);

namespace detail {
template <class Out, class X>
void require_same_whole(Out const& out, X const& x, site where) {
  if (out.whole() != x.whole() || out.place() != x.place())
    throw size_error("E-partition-007", where, "arithmetic on a part of ", text_of(x.whole()), " of rank ",
                     x.place().rank, " and one of ", text_of(out.whole()), " of rank ", out.place().rank,
                     "; both must be the same part of the same mesh");
}
template <class T, int Rank, class Memory>
view<T, 1, Memory> flat(view<T, Rank, Memory> local) {
  return {local.data(), {local.size()}};
}
struct constants; // names the scratch that they stand in
} // namespace detail

/// out = a + b. `out` may be the memory of either. Throws size_error (E-partition-007) for other wholes.
template <exec::space Ex, partitioned_array Out, partitioned_array A, partitioned_array B>
  requires same_partition<Out, A> && same_partition<Out, B> && linear_in_summands<Out>
void add(Ex& ex, Out&& out, A const& a, B const& b, site where = site::here()) {
  detail::require_same_whole(out, a, where);
  detail::require_same_whole(out, b, where);
  ops::add(ex, detail::flat(out.local()), detail::flat(a.local()), detail::flat(b.local()), where);
}

/// out = factor * x. `out` may be x's memory.
template <exec::space Ex, partitioned_array Out, partitioned_array X>
  requires same_partition<Out, X> && linear_in_summands<Out>
void scale(Ex& ex, Out&& out, X const& x, float factor, site where = site::here()) {
  detail::require_same_whole(out, x, where);
  ops::scale(ex, detail::flat(out.local()), detail::flat(x.local()), factor, where);
}

/// out = x + constant, which is rounded to the storage type. `out` may be x's memory. Two passes.
template <exec::space Ex, partitioned_array Out, partitioned_array X>
  requires same_partition<Out, X> && summands_added<Out>
void add_constant(Ex& ex, Out&& out, X const& x, float constant, site where = site::here()) {
  using T = typename std::remove_cvref_t<Out>::value_type;
  using memory = typename Ex::memory;
  detail::require_same_whole(out, x, where);
  auto const n = x.local().size();
  auto& kept = ex.template handle<exec::scratch<detail::constants, memory>>();
  view<T, 1, memory> const constants(kept.template take<T>(n, where), {n});
  ops::fill(ex, constants, constant, where);
  ops::add(ex, detail::flat(out.local()), detail::flat(x.local()), constants, where);
}

/// Calls f(out, inputs...) with the local parts as flat views: for any operation that computes each element
/// from the elements at its place (products, activations, dropout).
template <class F, partitioned_array Out, partitioned_array... X>
  requires(summands_added<Out>&&...&& same_partition<Out, X>)
void pointwise(F&& f, Out&& out, X const&... x) {
  (detail::require_same_whole(out, x, site::here()), ...);
  f(detail::flat(out.local()), detail::flat(x.local())...);
}

} // namespace tessera::inline TESSERA_ABI::partition

#endif
