/// What the strategies of this room act on: the weights of all units in one buffer, their gradients in
/// another of the same shape, and where each unit stands. Borrowed: the buffers belong to whoever runs the
/// model.
///
///     nn::parameter_store<exec::host, bf16, float> store(units);
///     auto flat = parallel::flat_model_of(store, optim::decay_rule{.position_embedding = false});
#ifndef TESSERA_PARALLEL_FLAT_MODEL_HPP
#define TESSERA_PARALLEL_FLAT_MODEL_HPP

#include <tessera/nn/parameter_store.hpp>
#include <tessera/optim/decay.hpp>

namespace tessera::inline TESSERA_ABI::parallel {

template <storage_scalar T, storage_scalar G, memory_space Memory = host_memory>
struct flat_model {
  memory_span<T, Memory> weights;
  memory_span<G, Memory> gradients;
  std::vector<layout::range> units; ///< Unit by unit, without gaps, from 0 to the end of `weights`.
  /// What weight decay acts on in each unit's block, counted from the block's beginning.
  std::vector<std::vector<layout::range>> decayed;

  memory_span<T, Memory> weights_of(layout::range part) const { return part_of(weights, part); }
  memory_span<G, Memory> gradients_of(layout::range part) const { return part_of(gradients, part); }

  /// Throws size_error (E-parallel-001) where the pieces do not fit together.
  void validate(site where = site::here()) const {
    index_t end = 0;
    auto fits = gradients.size() == weights.size() && decayed.size() == units.size();
    for (auto const& u : units) {
      fits = fits && u.begin == end && u.end >= u.begin;
      end = u.end;
    }
    if (!fits || end != static_cast<index_t>(weights.size()))
      throw size_error("E-parallel-001", where, "a flat model has ", weights.size(), " weights, ",
                       gradients.size(), " gradients, ", units.size(), " units that end at ", end, " and ",
                       decayed.size(),
                       " masks of weight decay; units must follow each other from 0 to the end "
                       "of the weights, with a gradient for each weight and a mask for each unit");
  }

private:
  template <span_in<Memory> Span>
  static Span part_of(Span all, layout::range part) {
    return all.subspan(static_cast<std::size_t>(part.begin), static_cast<std::size_t>(part.size()));
  }
};

/// The flat model of a parameter store that holds gradients.
template <exec::space Ex, storage_scalar T, storage_scalar G>
flat_model<T, G, typename Ex::memory> flat_model_of(nn::parameter_store<Ex, T, G>& store,
                                                    optim::decay_rule rule = {}) {
  flat_model<T, G, typename Ex::memory> flat{store.weights(), store.gradients(), {}, {}};
  for (std::size_t u = 0; u < store.units(); ++u) {
    flat.units.push_back(store.unit_range(u));
    flat.decayed.push_back(optim::decayed_ranges(store.parameters(u), rule));
  }
  return flat;
}

} // namespace tessera::inline TESSERA_ABI::parallel

#endif
