/// A config turned into the units of a model: embedding, blocks, head. Of several ranks that share it, each
/// makes its part of the units, and only those of its stage of a pipeline.
///
///     auto units = make_transformer<exec::host, bf16, float>(tiny_llama());
///     auto mine = make_transformer<exec::host, bf16, float>(tiny_llama(), group, {0, 3});   // up to block.1
#ifndef TESSERA_NN_MAKE_TRANSFORMER_HPP
#define TESSERA_NN_MAKE_TRANSFORMER_HPP

#include <tessera/nn/embedding.hpp>
#include <tessera/nn/head.hpp>
#include <tessera/nn/transformer_block.hpp>

namespace tessera::inline TESSERA_ABI::nn {

/// Units of a config's model: the embedding is number 0, block i number i + 1, the head the last.
constexpr index_t unit_count(transformer_config const& config) noexcept {
  return config.layers + 2;
}

/// Units [begin, end) of the model in the order in which they run, as the rank that `group` describes holds
/// them. T is the storage type of weights and activations, G that of gradients. A tied head without its
/// embedding is tied to it all the same; embedding_parameters says what it borrows. Throws config_error for
/// an impossible config, or one that the group's ranks cannot share; size_error for units that do not exist.
template <exec::space Ex, storage_scalar T, storage_scalar G, rank_group<Ex> Group>
unit_list<Ex, T, G> make_transformer(transformer_config const& config, Group const& group, layout::range part,
                                     site where = site::here()) {
  config.validate(where);
  auto const count = unit_count(config);
  if (part.begin < 0 || part.end < part.begin || part.end > count)
    throw size_error("E-nn-027", where, "units ", part.begin, " to ", part.end, " of a model of ", count,
                     "; the embedding is 0, the head ", count - 1);
  auto const gpt2 = config.family == transformer_family::gpt2;
  auto const has_head = part.end == count;
  unit_list<Ex, T, G> units;
  for (auto i = part.begin; i < part.end; ++i)
    if (i == 0)
      units.push_back(std::make_unique<embedding<Ex, T, G, Group>>(config, group, has_head));
    else if (i + 1 < count && gpt2)
      units.push_back(std::make_unique<gpt2_block<Ex, T, G, Group>>(config, i - 1, group));
    else if (i + 1 < count)
      units.push_back(std::make_unique<llama_block<Ex, T, G, Group>>(config, i - 1, group));
    else if (gpt2)
      units.push_back(std::make_unique<head<Ex, T, G, layer_norm<Ex, T, G>, Group>>(config, group));
    else
      units.push_back(std::make_unique<head<Ex, T, G, rms_norm<Ex, T, G>, Group>>(config, group));
  return units;
}

/// All units, whole.
template <exec::space Ex, storage_scalar T, storage_scalar G>
unit_list<Ex, T, G> make_transformer(transformer_config const& config, site where = site::here()) {
  return make_transformer<Ex, T, G>(config, one_rank(), {0, unit_count(config)}, where);
}

} // namespace tessera::inline TESSERA_ABI::nn

#endif
