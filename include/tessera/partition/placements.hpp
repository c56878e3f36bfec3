/// What the ranks along one axis of a mesh hold of a tensor. The placement is part of the tensor's type, and
/// the placement of its gradient follows from it.
///
/// | placement    | a rank holds                        | its gradient's placement (`dual`)            |
/// |--------------|-------------------------------------|----------------------------------------------|
/// | replicate    | the value                           | partial: each rank's use adds a summand      |
/// | invariant    | the value                           | invariant: it has been reduced already       |
/// | shard<dim>   | a stretch of dimension `dim`        | shard<dim>                                   |
/// | partial<op>  | a summand (or a candidate) of it    | replicate: each summand counts in full       |
///
///     using rows = placed<axis::tensor, shard<0>>;      // cut along the tensor axis
///     static_assert(std::same_as<dual<replicate>, partial<>>);
#ifndef TESSERA_PARTITION_PLACEMENTS_HPP
#define TESSERA_PARTITION_PLACEMENTS_HPP

#include <tessera/comm/communicator.hpp>
#include <tessera/layout/mesh_shape.hpp>

namespace tessera::inline TESSERA_ABI::partition {

using layout::axis;
using layout::axis_set;

enum class placement_kind : std::uint8_t { replicate, invariant, shard, partial };

/// A placement as a value: what plans are made of.
struct placement {
  placement_kind kind = placement_kind::invariant;
  int dim = -1;                                     ///< Of a shard.
  index_t granule = 1;                              ///< Of a shard: borders are multiples of it.
  comm::reduction operation = comm::reduction::sum; ///< Of a partial.

  constexpr bool cuts(int d) const noexcept { return kind == placement_kind::shard && dim == d; }
  constexpr bool sums() const noexcept { return kind == placement_kind::partial; }
  /// Every rank has the value.
  constexpr bool whole() const noexcept {
    return kind == placement_kind::replicate || kind == placement_kind::invariant;
  }
  friend constexpr bool operator==(placement const&, placement const&) = default;

  /// "shard<1>", "partial<sum>".
  friend std::string text_of(placement const& p) {
    if (p.kind == placement_kind::replicate) return "replicate";
    if (p.kind == placement_kind::invariant) return "invariant";
    if (p.sums()) return tessera::text_of("partial<", name_of(p.operation), ">");
    return p.granule == 1 ? tessera::text_of("shard<", p.dim, ">")
                          : tessera::text_of("shard<", p.dim, ", ", p.granule, ">");
  }
};

/// Every rank has the value, and uses it for itself: gradients of the ranks are summands.
struct replicate {
  static constexpr placement value{.kind = placement_kind::replicate};
};
/// Every rank has the value and its whole gradient.
struct invariant {
  static constexpr placement value{.kind = placement_kind::invariant};
};
/// Each rank has its part of dimension `Dim` (layout::shard_of; parts may be uneven or empty), with borders
/// at multiples of `Granule`. Axes that cut the same dimension cut in the order in which they are listed.
template <int Dim, index_t Granule = 1>
  requires(Dim >= 0 && Granule >= 1)
struct shard {
  static constexpr placement value{.kind = placement_kind::shard, .dim = Dim, .granule = Granule};
};
/// The value is what `Operation` over the ranks' elements gives, and has not been taken yet.
template <comm::reduction Operation = comm::reduction::sum>
struct partial {
  static constexpr placement value{.kind = placement_kind::partial, .operation = Operation};
};

template <class P>
concept placement_type = std::same_as<std::remove_cvref_t<decltype(P::value)>, placement>;

/// A maximum over ranks has no gradient placement: which rank's element it was is not known.
template <class P>
concept differentiable = placement_type<P> &&
    (P::value.kind != placement_kind::partial || P::value.operation == comm::reduction::sum);

namespace detail {
template <class P>
struct dual_of {
  using type = P; // invariant, shard
};
template <>
struct dual_of<replicate> {
  using type = partial<>;
};
template <>
struct dual_of<partial<>> {
  using type = replicate;
};
} // namespace detail

/// The placement of the gradient of what is placed so.
template <differentiable P>
using dual = typename detail::dual_of<P>::type;

/// A placement along a named axis: what a partitioned tensor's type lists.
template <axis Axis, placement_type P>
struct placed {
  static constexpr axis along = Axis;
  using placement = P;
};

namespace detail {
template <class>
inline constexpr bool is_placed = false;
template <axis Axis, class P>
inline constexpr bool is_placed<placed<Axis, P>> = true;
} // namespace detail

template <class P>
concept placed_type = detail::is_placed<P>;

/// Axes that a tensor's type may list.
inline constexpr int max_axes = 3;

/// The placements of a tensor along all its axes, as a value. Along axes that are not listed ranks are as
/// along an `invariant` one: they have nothing to do with each other.
struct partitioning {
  axis axes[max_axes] = {};
  placement at[max_axes] = {};
  int size = 0;

  friend constexpr bool operator==(partitioning const& a, partitioning const& b) noexcept {
    bool same = a.size == b.size;
    for (int i = 0; i < max_axes; ++i) same = same && a.axes[i] == b.axes[i] && a.at[i] == b.at[i];
    return same;
  }
  /// "data: partial<sum>, tensor: shard<0>".
  friend std::string text_of(partitioning const& parts) {
    std::string text;
    for (int i = 0; i < parts.size; ++i)
      text += tessera::text_of(i > 0 ? ", " : "", name_of(parts.axes[i]), ": ", text_of(parts.at[i]));
    return text;
  }
};

template <placed_type... Placed>
  requires(sizeof...(Placed) <= max_axes)
inline constexpr partitioning partitioning_of{
    {Placed::along...}, {Placed::placement::value...}, sizeof...(Placed)};

/// Placements that one tensor of `Rank` dimensions can have together: each axis once, each cut dimension
/// there, and one kind of reduction, since sums and maxima do not change places.
constexpr bool fits(partitioning const& parts, int rank) noexcept {
  for (int i = 0; i < parts.size; ++i) {
    if (parts.at[i].kind == placement_kind::shard && parts.at[i].dim >= rank) return false;
    for (int j = 0; j < i; ++j)
      if (parts.axes[i] == parts.axes[j] ||
          (parts.at[i].sums() && parts.at[j].sums() && parts.at[i].operation != parts.at[j].operation))
        return false;
  }
  return true;
}
template <int Rank, class... Placed>
concept placements_of_rank = (placed_type<Placed> && ...) && fits(partitioning_of<Placed...>, Rank);

/// A value placed as `from` can be brought to `to`: any to any, but that a maximum or minimum is made nowhere
/// (a rank that has nothing to say would need a neutral value), and that one reduction is not another.
constexpr bool can_become(placement const& from, placement const& to) noexcept {
  if (from == to) return true;
  return !to.sums() || (to.operation == comm::reduction::sum && !from.sums());
}
template <class From, class To>
concept becomes = placement_type<From> && placement_type<To> && can_become(From::value, To::value);

} // namespace tessera::inline TESSERA_ABI::partition

#endif
