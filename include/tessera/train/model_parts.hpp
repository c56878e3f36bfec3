/// A model that is spread over ranks, as a checkpoint sees it: every unit whole, by its parameters' names and
/// shapes, and what this rank keeps of each. Which ranks share a unit, and how, is no matter here: a
/// parameter map says which elements of the whole its elements are (layout/parameters.hpp).
///
///     train::whole_model whole{maps_of_all_units, {"exp_avg", "exp_avg_sq"}};
///     auto const part = [&](std::size_t unit) -> train::unit_part<float> { ... };
///     train::save_checkpoint(comm, ex, folder, state, whole, part);
#ifndef TESSERA_TRAIN_MODEL_PARTS_HPP
#define TESSERA_TRAIN_MODEL_PARTS_HPP

#include <concepts>
#include <string>
#include <vector>

#include <tessera/comm/communicator.hpp>
#include <tessera/layout/ownership.hpp>
#include <tessera/nn/parameter_store.hpp>

namespace tessera::inline TESSERA_ABI::train {

/// The same on every rank.
struct whole_model {
  std::vector<layout::parameter_map> units; ///< As one rank alone would hold them.
  std::vector<std::string> arrays;          ///< Of the optimizer's state, such as "exp_avg".
};

/// What this rank keeps of one unit.
template <storage_scalar T, memory_space Memory = host_memory>
struct unit_part {
  layout::parameter_map const* map = nullptr; ///< Of this rank's block of it; null: it has nothing of it.
  int tensor_rank = 0;                        ///< Among the ranks that hold parts of the same matrices.
  layout::range weights_at{};                 ///< Of the block: which weights are here.
  memory_span<T, Memory> weights{};
  layout::range state_at{};                        ///< Which state is here.
  std::vector<memory_span<float, Memory>> state{}; ///< One span for each of whole_model::arrays.
  /// What this rank writes of the block, inside both: over the ranks that hold the same block these ranges
  /// are disjoint and cover it (layout::ownership). Of parameters that several tensor ranks hold, the rank
  /// that counts them writes (layout::counts).
  layout::range counted{};
};

/// part(u): what this rank keeps of unit u of the whole model.
template <class P, class T, class Memory>
concept keeps_parts = storage_scalar<T> && memory_space<Memory> && requires(P const& part, std::size_t unit) {
  { part(unit) } -> std::same_as<unit_part<T, Memory>>;
};

/// The model of a store that holds all of it, without an optimizer.
template <exec::space Ex, storage_scalar T, storage_scalar G>
whole_model whole_model_of(nn::parameter_store<Ex, T, G> const& store) {
  whole_model whole;
  for (std::size_t u = 0; u < store.units(); ++u) whole.units.push_back(store.parameters(u));
  return whole;
}
/// With the optimizer of replicas (parallel/data_parallel.hpp).
template <exec::space Ex, storage_scalar T, storage_scalar G, class Replicas>
whole_model whole_model_of(nn::parameter_store<Ex, T, G> const& store, Replicas& replicas) {
  auto whole = whole_model_of(store);
  if (replicas.units() > 0)
    for (auto const& array : replicas.optimizer(0).state()) whole.arrays.emplace_back(array.name);
  return whole;
}

/// What a rank keeps of a model whose weights are replicated on all ranks of `comm`. Borrows all three.
template <comm::communicator Comm, exec::space Ex, storage_scalar T, storage_scalar G, class Replicas>
auto replicated_parts(Comm& comm, nn::parameter_store<Ex, T, G>& store, Replicas& replicas) {
  return [&comm, &store, &replicas](std::size_t u) {
    auto const size = store.unit_range(u).size();
    unit_part<T, typename Ex::memory> part{.map = &store.parameters(u),
                                           .weights_at = {0, size},
                                           .weights = store.weights(u),
                                           .state_at = replicas.owned(u),
                                           .counted = layout::ownership{comm.rank(), comm.size()}.of(size)};
    for (auto const& array : replicas.optimizer(u).state()) part.state.push_back(array.values);
    return part;
  };
}

} // namespace tessera::inline TESSERA_ABI::train

#endif
