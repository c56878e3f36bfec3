/// The starting values of parameters: each element is a function of the seed, its parameter's name and its
/// index in that parameter alone, so any rank may initialise any stretch and all agree.
///
///     initialise(ex, store, seed);
///     initialise(ex, map, shard, ex_shard_of_the_block, seed);
#ifndef TESSERA_NN_INITIALISE_HPP
#define TESSERA_NN_INITIALISE_HPP

#include <tessera/layout/ownership.hpp>
#include <tessera/nn/parameter_store.hpp>
#include <tessera/ops/random_normal.hpp>
#include <tessera/ops/scale.hpp>

namespace tessera::inline TESSERA_ABI::nn {

/// Fills `out`, which holds the elements `part` of a unit's block; gaps between parameters become zero.
/// Throws size_error where `out` has not the size of `part`.
template <exec::space Ex, span_in<typename Ex::memory> Out>
void initialise(Ex& ex, layout::parameter_map const& map, layout::range part, Out out, std::uint64_t seed,
                site where = site::here()) {
  if (static_cast<index_t>(out.size()) != part.size())
    throw size_error("E-nn-016", where, "initialise: ", out.size(), " elements for a stretch of ",
                     part.size());
  using stretch = view<typename Out::element_type, 1, typename Ex::memory>;
  ops::fill(ex, stretch(out.data(), {part.size()}), 0);
  for (auto const& piece : layout::segments_of(map, part)) {
    auto const start = piece.whole->start;
    ops::random_normal(ex, stretch(out.data() + (piece.in_block.begin - part.begin), {piece.in_block.size()}),
                       {.mean = start.mean,
                        .deviation = start.deviation,
                        .seed = seed,
                        .stream = layout::stream_of(piece.whole->name),
                        .first = piece.first_element},
                       where);
  }
}

/// Fills all weights of a store.
template <exec::space Ex, storage_scalar T, storage_scalar G>
void initialise(Ex& ex, parameter_store<Ex, T, G>& store, std::uint64_t seed) {
  for (std::size_t i = 0; i < store.units(); ++i)
    initialise(ex, store.parameters(i), {0, store.unit_range(i).size()}, store.weights(i), seed);
}

} // namespace tessera::inline TESSERA_ABI::nn

#endif
