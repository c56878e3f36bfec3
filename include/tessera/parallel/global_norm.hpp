/// The Euclidean norm of all gradients of a model, and clipping by it. Who counts which element is asked of
/// layout::ownership, so that each element counts once, whether the ranks hold replicas or shards.
///
///     auto norm = parallel::global_norm(comm, ex, gradients, units);   // every rank: the same bits
///     auto factor = parallel::clip_factor(norm, 1.0);                  // what gradients are multiplied by
///
/// A gradient that is infinite or NaN on any rank makes the norm so on all of them: whatever they decide by
/// it, they decide together.
#ifndef TESSERA_PARALLEL_GLOBAL_NORM_HPP
#define TESSERA_PARALLEL_GLOBAL_NORM_HPP

#include <cmath>

#include <tessera/comm/communicator.hpp>
#include <tessera/core/memory_span.hpp>
#include <tessera/layout/ownership.hpp>
#include <tessera/ops/reduce.hpp>

namespace tessera::inline TESSERA_ABI::parallel {

/// The sum of squares, in double, of the elements that `who` counts. `units` are the blocks of the flat
/// buffer `gradients`; what this rank owns of it must have been reduced over the ranks.
template <exec::space Ex, span_in<typename Ex::memory> Gradients>
double counted_squares(Ex& ex, Gradients gradients, std::span<layout::range const> units,
                       layout::ownership who) {
  using stretch = view<typename Gradients::element_type, 1, typename Ex::memory>;
  double sum = 0;
  for (auto const& unit : units) {
    auto const mine = who.of(unit.size());
    sum += ops::sum_of_squares(ex, stretch(gradients.data() + unit.begin + mine.begin, {mine.size()}));
  }
  return sum;
}

/// The norm over all ranks. Called by every rank. Cost: one pass over 1 / ranks of the gradients, one message
/// of 8 bytes.
template <comm::communicator Comm, exec::space Ex, span_in<typename Ex::memory> Gradients>
double global_norm(Comm& comm, Ex& ex, Gradients gradients, std::span<layout::range const> units) {
  auto const mine = counted_squares(ex, gradients, units, {comm.rank(), comm.size()});
  return std::sqrt(comm.all_reduce(mine, comm::reduce_options{}));
}

/// The factor that shortens a gradient of length `norm` to `limit`; 1 where it is shorter. A limit of 0 means
/// no clipping.
constexpr double clip_factor(double norm, double limit) noexcept {
  return limit > 0 && norm > limit ? limit / norm : 1;
}

} // namespace tessera::inline TESSERA_ABI::parallel

#endif
