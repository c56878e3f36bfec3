/// A tensor that several ranks hold together. Its type says how: one placement for each axis of the mesh that
/// has to do with it. `partitioned_tensor` owns this rank's memory; `partitioned_view` puts the words on
/// memory that is there already, such as a layer's activations, or a flat block of parameters.
///
///     using cut = placed<axis::tensor, shard<0>>;
///     partitioned_tensor<bf16, 2, host_memory, cut> rows(mesh.place(), {n, width});
///     rows.local();                      // this rank's rows, a plain view
///     rows.box().begin[0];               // the first one's number in the whole
///     auto sums = partitioned<placed<axis::tensor, partial<>>>(mesh.place(), {n, width}, local_sums);
///
/// Cost: the view is the local view, the whole's extents and the rank's place on the mesh; no communication.
#ifndef TESSERA_PARTITION_PARTITIONED_TENSOR_HPP
#define TESSERA_PARTITION_PARTITIONED_TENSOR_HPP

#include <tessera/core/tensor.hpp>
#include <tessera/partition/box.hpp>

namespace tessera::inline TESSERA_ABI::partition {

template <class T, int Rank, memory_space Memory, class... Placed>
  requires placements_of_rank<Rank, Placed...>
class partitioned_tensor;

/// Borrowed, trivially copyable. The local view is this rank's box of the whole, without gaps.
template <class T, int Rank, memory_space Memory, class... Placed>
  requires placements_of_rank<Rank, Placed...>
class partitioned_view {
public:
  using element_type = T;
  using value_type = std::remove_const_t<T>;
  using memory = Memory;
  static constexpr int rank = Rank;
  static constexpr partitioning parts = partitioning_of<Placed...>;

  partitioned_view() = default;
  /// Throws size_error where `local` is not what this rank holds of the whole (E-partition-002) or has gaps
  /// (E-partition-003).
  partitioned_view(layout::mesh_place const& place, extents<Rank> const& whole,
                   tessera::view<T, Rank, Memory> local, site where = site::here())
      : place_(place), whole_(whole), local_(local) {
    auto const mine = box();
    if (local.extents() != mine.sizes)
      throw size_error("E-partition-002", where, "rank ", place.rank, " of the mesh ", text_of(place.shape),
                       " holds ", text_of(mine.sizes), " of ", text_of(whole), " (", text_of(parts),
                       "), and was given a view of ", text_of(local.extents()));
    if (!local.contiguous())
      throw size_error("E-partition-003", where, "a part of ", text_of(whole), " (", text_of(parts),
                       ") is a view with gaps; copy it into a contiguous tensor first");
  }
  /// Of constant elements from mutable ones.
  template <class U>
    requires(std::is_const_v<T>&& std::same_as<U, std::remove_const_t<T>>)
  partitioned_view(partitioned_view<U, Rank, Memory, Placed...> const& other) // NOLINT: meant to be implicit
      : place_(other.place()), whole_(other.whole()), local_(other.local()) {}

  partitioned_view view() const noexcept { return *this; }

  tessera::view<T, Rank, Memory> local() const noexcept { return local_; }
  extents<Rank> const& whole() const noexcept { return whole_; }
  layout::mesh_place const& place() const noexcept { return place_; }
  /// Which elements of the whole these are.
  partition::box<Rank> box() const { return local_box(whole_, parts, place_.shape, place_.coordinates()); }

  /// Where the whole has the local element at `index`: its number in row-major order.
  template <std::convertible_to<index_t>... Index>
    requires(sizeof...(Index) == Rank)
  index_t number_of(Index... index)
  const {
    index_t const at[] = {static_cast<index_t>(index)...};
    auto const begin = box().begin;
    index_t number = 0;
    for (std::size_t d = 0; d < Rank; ++d) number = number * whole_[d] + begin[d] + at[d];
    return number;
  }

private:
  template <class U, int R, memory_space M, class... P>
    requires placements_of_rank<R, P...>
  friend class partitioned_tensor;
  struct known_to_fit {};
  partitioned_view(known_to_fit, layout::mesh_place const& place, extents<Rank> const& whole,
                   tessera::view<T, Rank, Memory> local) noexcept
      : place_(place), whole_(whole), local_(local) {}

  layout::mesh_place place_;
  extents<Rank> whole_{};
  tessera::view<T, Rank, Memory> local_;
};

/// Owns this rank's part, zeros at first. Move-only.
template <class T, int Rank, memory_space Memory, class... Placed>
  requires placements_of_rank<Rank, Placed...>
class partitioned_tensor {
public:
  using element_type = T;
  using value_type = T;
  using memory = Memory;
  using view_type = partitioned_view<T, Rank, Memory, Placed...>;
  static constexpr int rank = Rank;
  static constexpr partitioning parts = view_type::parts;

  partitioned_tensor() = default;
  /// Throws size_error for impossible extents, out_of_memory where memory runs out.
  partitioned_tensor(layout::mesh_place const& place, extents<Rank> const& whole, memory_account account = {},
                     site where = site::here())
      : place_(place), whole_(whole),
        memory_(local_box(whole, parts, place.shape, place.coordinates()).sizes, account, where) {}

  view_type view() noexcept { return {typename view_type::known_to_fit{}, place_, whole_, memory_.view()}; }
  partitioned_view<T const, Rank, Memory, Placed...> view() const noexcept {
    using constant = partitioned_view<T const, Rank, Memory, Placed...>;
    return {typename constant::known_to_fit{}, place_, whole_, memory_.view()};
  }
  operator view_type() noexcept { return view(); } // NOLINT: meant to be implicit
  operator partitioned_view<T const, Rank, Memory, Placed...>() const noexcept { return view(); } // NOLINT

  tessera::view<T, Rank, Memory> local() noexcept { return memory_.view(); }
  tessera::view<T const, Rank, Memory> local() const noexcept { return memory_.view(); }
  extents<Rank> const& whole() const noexcept { return whole_; }
  layout::mesh_place const& place() const noexcept { return place_; }
  partition::box<Rank> box() const { return view().box(); }

private:
  layout::mesh_place place_;
  extents<Rank> whole_{};
  tensor<T, Rank, Memory> memory_;
};

/// A view of memory that is there: the type follows from the local view.
template <placed_type... Placed, class T, int Rank, memory_space Memory>
  requires placements_of_rank<Rank, Placed...> partitioned_view<T, Rank, Memory, Placed...>
  partitioned(layout::mesh_place const& place, std::type_identity_t<extents<Rank>> const& whole,
              view<T, Rank, Memory> local, site where = site::here()) {
    return {place, whole, local, where};
  }

namespace detail {
template <class X>
struct view_of;
template <class T, int Rank, class Memory, class... Placed>
struct view_of<partitioned_view<T, Rank, Memory, Placed...>> {
  using type = partitioned_view<T, Rank, Memory, Placed...>;
};
template <class T, int Rank, class Memory, class... Placed>
struct view_of<partitioned_tensor<T, Rank, Memory, Placed...>>
    : view_of<partitioned_view<T, Rank, Memory, Placed...>> {};

template <class X>
using view_t = typename view_of<std::remove_cvref_t<X>>::type;
template <class X>
using value_t = typename view_t<X>::value_type;
template <class X>
using memory_t = typename view_t<X>::memory;

template <class View>
struct dual_view;
template <class T, int Rank, class Memory, class... Placed>
struct dual_view<partitioned_view<T, Rank, Memory, Placed...>> {
  using type = partitioned_view<std::remove_const_t<T>, Rank, Memory,
                                placed<Placed::along, dual<typename Placed::placement>>...>;
};
} // namespace detail

/// A partitioned view or tensor.
template <class X>
concept partitioned_array = requires {
  typename detail::view_t<X>;
};

/// What the gradient of X is: the same elements under the dual placements.
template <partitioned_array X>
using gradient_of = typename detail::dual_view<detail::view_t<X>>::type;

} // namespace tessera::inline TESSERA_ABI::partition

#endif
