/// The short way: a plan of one collective along one axis, on parts of equal sizes that stand in memory as
/// the message wants them, is that collective and nothing else.
#ifndef TESSERA_PARTITION_DETAIL_DIRECT_HPP
#define TESSERA_PARTITION_DETAIL_DIRECT_HPP

#include <tessera/partition/detail/steps.hpp>
#include <tessera/partition/mesh.hpp>

namespace tessera::inline TESSERA_ABI::partition::detail {

/// The axis along which all of a plan happens, if there is one.
constexpr bool is_single(step_list const& steps) noexcept {
  return steps.size == 1 && sends(steps.at[0].what) &&
         steps.at[0].changes[0] + steps.at[0].changes[1] + steps.at[0].changes[2] == 1;
}
constexpr axis axis_of(step const& s) noexcept {
  for (auto one : layout::axes_in_order)
    if (s.along.has(one)) return one;
  return axis::data;
}

/// The pieces that a shard cuts `local` into (or joins it from) follow each other in memory and are equal, as
/// long as this rank's, `piece`. That is so just where ranks * granule divides the extent, on all ranks
/// alike.
template <class View>
[[gnu::always_inline]] inline bool equal_pieces(View const& local, placement const& cut, index_t piece,
                                                int ranks) noexcept {
  for (int d = 0; d < cut.dim; ++d)
    if (local.extent(d) != 1) return false;
  return local.extent(cut.dim) == piece * ranks && piece % cut.granule == 0;
}

/// Does Plan::steps by one blocking call of the communicator, or returns false. Inlined, since beside a
/// message of a few KiB a copied view or a division shows.
template <class Plan, class Comm, class T, int Rank, class Memory>
[[gnu::always_inline]] inline bool run_directly(mesh<Comm>& on, view<T, Rank, Memory> const& to,
                                                view<T const, Rank, Memory> const& from,
                                                comm::summation order, site const& where) {
  if constexpr (is_single(Plan::steps)) {
    constexpr auto doing = Plan::steps.at[0];
    auto& group = on.along(axis_of(doing));
    auto const ranks = group.size();
    if (ranks == 1) return false;
    memory_span<T, Memory> const out(to.data(), static_cast<std::size_t>(to.size()));
    memory_span<T const, Memory> const in(from.data(), static_cast<std::size_t>(from.size()));
    comm::reduce_options const how{.operation = doing.from.operation, .order = order};
    auto const cuts = [&] { return equal_pieces(from, doing.to, to.extent(doing.to.dim), ranks); };
    auto const joins = [&] { return equal_pieces(to, doing.from, from.extent(doing.from.dim), ranks); };
    if constexpr (doing.what == movement::all_reduce) {
      group.all_reduce(out, in, how, where);
      return true;
    } else if constexpr (doing.what == movement::reduce_scatter) {
      if (!cuts()) return false;
      group.reduce_scatter(out, in, how, where);
      return true;
    } else if constexpr (doing.what == movement::all_gather) {
      if (!joins()) return false;
      group.all_gather(out, in, where);
      return true;
    } else if constexpr (doing.from.dim != doing.to.dim) {
      if (!cuts() || !joins()) return false;
      group.all_to_all(out, in, where);
      return true;
    }
  }
  return false;
}

} // namespace tessera::inline TESSERA_ABI::partition::detail

#endif
