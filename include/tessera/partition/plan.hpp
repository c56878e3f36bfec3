/// What a redistribution will do, before it does it: the steps that were chosen, each collective with its
/// ranks and the bytes that this rank sends.
///
///     std::puts(text_of(plan_of<shard<0>>(sums)).c_str());
///     //   [8, 6] x 4 bytes on tensor 4, rank 0: tensor: partial<sum> -> tensor: shard<0>
///     //     reduce_scatter along tensor (4 ranks), partial<sum> -> shard<0>: sends 144 bytes
///     //   sends 144 bytes
///
/// The steps are chosen by the compiler (`cheapest_steps`), for the fewest bytes sent where each axis has
/// four ranks; the plan of the backward is that of the dual placements. Bytes are counted as the
/// communicator's traffic meter counts what it sends: for n bytes over N ranks n (N-1)/N for a reduce_scatter
/// or an all_gather, twice that for an all_reduce, and for an all_to_all all but what stays.
#ifndef TESSERA_PARTITION_PLAN_HPP
#define TESSERA_PARTITION_PLAN_HPP

#include <vector>

#include <tessera/partition/detail/geometry.hpp>
#include <tessera/partition/partitioned_tensor.hpp>

namespace tessera::inline TESSERA_ABI::partition {

/// A step with its figures for one rank.
struct planned_step {
  step doing;
  index_t ranks = 1;
  index_t sent_bytes = 0;
};

struct plan {
  std::string title;
  std::vector<planned_step> steps; ///< Those along axes of one rank are left out: they are nothing.

  index_t sent_bytes() const noexcept {
    index_t sum = 0;
    for (auto const& each : steps) sum += each.sent_bytes;
    return sum;
  }

  friend std::string text_of(plan const& p) {
    auto text = p.title + "\n";
    for (auto const& [doing, ranks, sent] : p.steps) {
      text += tessera::text_of("  ", name_of(doing.what), " along ", text_of(doing.along), " (", ranks,
                               " ranks), ", text_of(doing.from), " -> ", text_of(doing.to));
      if (sends(doing.what)) text += tessera::text_of(": sends ", sent, " bytes");
      text += "\n";
    }
    return text +
           (p.steps.empty() ? "  nothing to do\n" : tessera::text_of("sends ", p.sent_bytes(), " bytes\n"));
  }
};

/// The plan of a rank for a tensor of `whole` elements of `item` bytes.
template <std::size_t Rank>
plan make_plan(std::array<index_t, Rank> const& whole, index_t item, layout::mesh_place const& place,
               partitioning const& from, partitioning const& to) {
  plan made;
  made.title = tessera::text_of(text_of(whole), " x ", item, " bytes on ", text_of(place.shape), ", rank ",
                                place.rank, ": ", text_of(from), " -> ", text_of(to));
  auto const steps = cheapest_steps(from, to);
  auto now = from;
  for (int i = 0; i < steps.size; ++i) {
    detail::stage<narrow<int>(Rank)> const stage(whole, place, now, steps.at[i]);
    if (stage.ranks() > 1) made.steps.push_back({steps.at[i], stage.ranks(), stage.sent_bytes(item)});
    now = stage.then;
  }
  return made;
}

namespace detail {
template <class X, class... To>
inline constexpr bool can_be_placed = false; // another number of placements than axes
template <class T, int Rank, class Memory, class... Placed, class... To>
  requires(sizeof...(Placed) == sizeof...(To))
inline constexpr bool can_be_placed<partitioned_view<T, Rank, Memory, Placed...>, To...> =
    (becomes<typename Placed::placement, To> && ...) &&
    placements_of_rank<Rank, placed<Placed::along, To>...>;

/// `X` under other placements along the same axes.
template <class X, class... To>
struct placed_as;
template <class T, int Rank, class Memory, class... Placed, class... To>
struct placed_as<partitioned_view<T, Rank, Memory, Placed...>, To...> {
  using view = partitioned_view<T, Rank, Memory, placed<Placed::along, To>...>;
  using tensor = partitioned_tensor<std::remove_const_t<T>, Rank, Memory, placed<Placed::along, To>...>;
};
} // namespace detail

/// X can be redistributed to these placements, one for each of its axes.
template <class X, class... To>
concept redistributable_to =
    partitioned_array<X> &&(placement_type<To>&&...) && detail::can_be_placed<detail::view_t<X>, To...>;

/// What redistribute<To...>(ex, mesh, x) will do on this rank.
template <placement_type... To, partitioned_array X>
  requires redistributable_to<X, To...> plan plan_of(X const& x) {
    using from = detail::view_t<X>;
    return make_plan(x.whole(), sizeof(typename X::value_type), x.place(), from::parts,
                     detail::placed_as<from, To...>::view::parts);
  }

} // namespace tessera::inline TESSERA_ABI::partition

#endif
