/// The starting values of parameters: each element is a function of the seed, its parameter's name and its
/// index in that parameter alone, so any rank may initialise any stretch and all agree.
///
///     initialise(ex, store, seed);
///     initialise(ex, map, shard, ex_shard_of_the_block, seed);
#ifndef TESSERA_NN_INITIALISE_HPP
#define TESSERA_NN_INITIALISE_HPP

#include <tessera/core/philox.hpp>
#include <tessera/layout/ownership.hpp>
#include <tessera/nn/parameter_store.hpp>

namespace tessera::inline TESSERA_ABI::nn {

/// Fills `out`, which holds the elements `part` of a unit's block; gaps between parameters become zero.
/// Throws size_error where `out` has not the size of `part`.
template <exec::host_space Ex, storage_scalar T>
void initialise(Ex& ex, layout::parameter_map const& map, layout::range part, std::span<T> out,
                std::uint64_t seed, site where = site::here()) {
  if (static_cast<index_t>(out.size()) != part.size())
    throw size_error("E-nn-016", where, "initialise: ", out.size(), " elements for a stretch of ",
                     part.size());
  for (auto& value : out) value = T(0.0f);
  for (auto const& piece : layout::segments_of(map, part)) {
    auto const random = philox(seed, layout::stream_of(piece.whole->name));
    auto const start = piece.whole->start;
    auto* const to = out.data() + (piece.in_block.begin - part.begin);
    ex.parallel_for(piece.in_block.size(), 1024, [&](index_t begin, index_t end) {
      for (auto i = begin; i < end; ++i)
        to[i] = T(start.deviation == 0
                      ? start.mean
                      : start.mean + start.deviation *
                                         random.normal(static_cast<std::uint64_t>(piece.first_element + i)));
    });
  }
}

/// Fills all weights of a store.
template <exec::host_space Ex, storage_scalar T, storage_scalar G>
void initialise(Ex& ex, parameter_store<Ex, T, G>& store, std::uint64_t seed) {
  for (std::size_t i = 0; i < store.units(); ++i)
    initialise(ex, store.parameters(i), {0, store.unit_range(i).size()}, store.weights(i), seed);
}

} // namespace tessera::inline TESSERA_ABI::nn

#endif
