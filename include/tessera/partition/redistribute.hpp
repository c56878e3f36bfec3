/// From one partition to another: the collective follows from the two types, and so does its backward.
///
///     auto full = redistribute<replicate>(ex, mesh, rows);              // from shard<0>: all_gather
///     auto d_rows = redistribute_backward<shard<0>>(ex, mesh, d_full);  // its backward: reduce_scatter
///     redistribute(ex, mesh, mine, sums);                               // into memory that is there
///     auto pending = start_redistribute(ex, mesh, mine, sums);          // as a request
///
/// | from \ to            | replicate or invariant | shard<j>       | partial    |
/// |----------------------|------------------------|----------------|------------|
/// | replicate, invariant | nothing                | slice          | first_only |
/// | shard<i>             | all_gather             | all_to_all     | pad        |
/// | partial              | all_reduce             | reduce_scatter | nothing    |
///
/// Along several axes the compiler chooses the steps (partition/plan.hpp prints them); along data and context
/// together one collective over both is among the choices. The gradient of what is placed as P is placed as
/// dual<P>, so the backward of any redistribution is the redistribution from dual<To> to dual<From>.
///
/// Called by: every rank of the mesh that differs in the tensor's axes, in the same order, with tensors of
/// the same whole. Cost: the plan's bytes; a shard of a dimension that is not the outermost one is packed or
/// unpacked by one pass over this rank's elements. Order of sums: each collective's (rank order by default).
/// Memory for packing is kept by the space and used again. In device memory the program also includes
/// exec/copy_cuda.hpp.
#ifndef TESSERA_PARTITION_REDISTRIBUTE_HPP
#define TESSERA_PARTITION_REDISTRIBUTE_HPP

#include <cstdint>
#include <cstring>
#include <type_traits>

#include <tessera/partition/detail/direct.hpp>
#include <tessera/partition/detail/journey.hpp>
#include <tessera/partition/plan.hpp>

namespace tessera::inline TESSERA_ABI::partition {

struct redistribute_options {
  comm::summation order = comm::summation::rank_order;
};

namespace detail {
template <class From, class To>
inline constexpr bool goes_into = false; // other elements, axes or memory
template <class T, class U, int Rank, class Memory, axis... Axes, class... From, class... To>
  requires(std::same_as<std::remove_const_t<T>, U> && sizeof...(From) == sizeof...(To))
inline constexpr bool goes_into<partitioned_view<T, Rank, Memory, placed<Axes, From>...>,
                                partitioned_view<U, Rank, Memory, placed<Axes, To>...>> =
    (becomes<From, To> && ...);

/// The steps as a type: nvcc takes no reference to them as a template's argument.
template <class From, class To>
struct change {
  static constexpr step_list steps = cheapest_steps(view_t<From>::parts, view_t<To>::parts);
};
} // namespace detail

/// Both are the same elements along the same axes in the same memory, and each placement can become the
/// other's.
template <class From, class To>
concept redistributable = partitioned_array<From> && partitioned_array<To> &&
    detail::goes_into<detail::view_t<From>, detail::view_t<To>>;

/// The space works where the tensor stands, and the communicator's messages may stand there.
template <class Comm, class Ex, class X>
concept moves = exec::space<Ex> && partitioned_array<X> && comm::communicates_in<Comm, detail::memory_t<X>> &&
    std::same_as<typename Ex::memory, detail::memory_t<X>> && comm::reducible_scalar<detail::value_t<X>>;

namespace detail {

template <class Comm, class Out, class X>
[[noreturn, gnu::cold, gnu::noinline]] void refuse_apart(mesh<Comm> const& on, Out const& out, X const& x,
                                                         site const& where) {
  if (x.place() != on.place() || out.place() != on.place())
    throw size_error("E-partition-005", where, "redistribute: a tensor of rank ", x.place().rank,
                     " of the mesh ", text_of(x.place().shape), " into one of rank ", out.place().rank,
                     " of ", text_of(out.place().shape), ", by rank ", on.rank(), " of ",
                     text_of(on.shape()));
  throw size_error("E-partition-006", where, "redistribute: `x` is a part of ", text_of(x.whole()),
                   ", `out` of ", text_of(out.whole()), "; both must be the same");
}
/// Whether two values without padding are the same: beside a short message the call of memcmp shows that
/// compilers make of `==`.
template <class T>
  requires(std::has_unique_object_representations_v<T> && sizeof(T) % sizeof(std::uint64_t) == 0)
[[gnu::always_inline]] inline bool same_bits(T const& a, T const& b) noexcept {
  std::uint64_t different = 0;
  for (std::size_t at = 0; at < sizeof(T); at += sizeof(std::uint64_t)) {
    std::uint64_t x = 0, y = 0;
    std::memcpy(&x, reinterpret_cast<std::byte const*>(&a) + at, sizeof x);
    std::memcpy(&y, reinterpret_cast<std::byte const*>(&b) + at, sizeof y);
    different |= x ^ y;
  }
  return different == 0;
}
template <class Comm, class Out, class X>
[[gnu::always_inline]] inline void require_together(mesh<Comm> const& on, Out const& out, X const& x,
                                                    site const& where) {
  if (!same_bits(x.place(), on.place()) || !same_bits(out.place(), on.place()) ||
      !same_bits(x.whole(), out.whole()))
    refuse_apart(on, out, x, where);
}

template <class Ex, class Comm, class Out, class X>
auto journey_between(Ex& ex, mesh<Comm>& on, Out const& out, X const& x, redistribute_options const& how,
                     site const& where) {
  using T = typename Out::value_type;
  return journey<Ex, Comm, T, Out::rank>(ex, on,
                                         itinerary<T, Out::rank>{.to = out.local().data(),
                                                                 .from = x.local().data(),
                                                                 .whole = x.whole(),
                                                                 .before = X::parts,
                                                                 .steps = &change<X, Out>::steps,
                                                                 .order = how.order,
                                                                 .where = where});
}

/// Apart from what calls it, so that the short way needs no room for a journey.
template <class Ex, class Comm, class Out, class X>
[[gnu::noinline]] void run_journey(Ex& ex, mesh<Comm>& on, Out& out, X const& x,
                                   redistribute_options const& how, site const& where) {
  journey_between(ex, on, out.view(), x.view(), how, where).run();
}

} // namespace detail

/// Brings x to the placements of `out`. `out` is other memory, or x's own where nothing but sums is to be
/// done to it (all_reduce, first_only, nothing), or overlaps it as the collective allows.
/// Throws size_error: another mesh (E-partition-005), another whole (E-partition-006), an overlap
/// (E-partition-004); and what the collectives throw. Flattened, so that the short way is one function down
/// to the library's call.
template <exec::space Ex, comm::communicator Comm, partitioned_array Out, partitioned_array X>
  requires moves<Comm, Ex, X> && redistributable<X, Out>
[[gnu::flatten]] void redistribute(Ex& ex, mesh<Comm>& on, Out&& out, X const& x,
                                   redistribute_options const& how = {}, site const& where = site::here()) {
  detail::require_together(on, out, x, where);
  using T = typename std::remove_cvref_t<Out>::value_type;
  view<T const, std::remove_cvref_t<Out>::rank, typename Ex::memory> const local = x.local();
  if (detail::run_directly<detail::change<X, Out>>(on, out.local(), local, how.order, where)) return;
  detail::run_journey(ex, on, out, x, how, where);
}

/// The same into new memory, to these placements: one for each of x's axes, in its order.
template <placement_type... To, exec::space Ex, comm::communicator Comm, partitioned_array X>
  requires moves<Comm, Ex, X> && redistributable_to<X, To...>
[[nodiscard]] auto redistribute(Ex& ex, mesh<Comm>& on, X const& x, redistribute_options const& how = {},
                                site const& where = site::here()) {
  using from = detail::view_t<X>;
  typename detail::placed_as<from, To...>::tensor out(x.place(), x.whole(), {}, where);
  redistribute(ex, on, out, x, how, where);
  return out;
}

/// The backward of redistribute<To...> of what was placed as From...: d_out, placed as dual<To>..., becomes
/// the gradient of the input, placed as dual<From>.... (Into memory of the caller: `redistribute` itself.)
template <differentiable... From, exec::space Ex, comm::communicator Comm, partitioned_array X>
  requires moves<Comm, Ex, X> && redistributable_to<X, dual<From>...>
[[nodiscard]] auto redistribute_backward(Ex& ex, mesh<Comm>& on, X const& d_out,
                                         redistribute_options const& how = {},
                                         site const& where = site::here()) {
  return redistribute<dual<From>...>(ex, on, d_out, how, where);
}

/// A redistribution under way. Move-only; its memory is lent until wait() returns or test() is true. A plan
/// of several collectives goes from one to the next inside these: until it has ended, its axes' communicators
/// take no other call. Dropped unfinished it waits, or, while an exception unwinds, is abandoned.
template <exec::space Ex, comm::communicator Comm, class T, int Rank>
class redistribution {
public:
  explicit redistribution(detail::journey<Ex, Comm, T, Rank>&& journey)
      : journey_(static_cast<detail::journey<Ex, Comm, T, Rank>&&>(journey)) {
    journey_.start();
  }
  void wait() { journey_.wait(); }
  bool test() { return journey_.test(); }

private:
  detail::journey<Ex, Comm, T, Rank> journey_;
};

/// redistribute(ex, on, out, x) as a request. All ranks start it, or none.
template <exec::space Ex, comm::communicator Comm, partitioned_array Out, partitioned_array X>
  requires moves<Comm, Ex, X> && redistributable<X, Out>
[[nodiscard]] auto start_redistribute(Ex& ex, mesh<Comm>& on, Out&& out, X const& x,
                                      redistribute_options const& how = {},
                                      site const& where = site::here()) {
  using T = typename std::remove_cvref_t<Out>::value_type;
  detail::require_together(on, out, x, where);
  return redistribution<Ex, Comm, T, std::remove_cvref_t<Out>::rank>(
      detail::journey_between(ex, on, out.view(), x.view(), how, where));
}

} // namespace tessera::inline TESSERA_ABI::partition

#endif
