/// A config turned into the units of a model: embedding, blocks, head.
///
///     auto units = make_transformer<exec::host, bf16, float>(tiny_llama());
#ifndef TESSERA_NN_MAKE_TRANSFORMER_HPP
#define TESSERA_NN_MAKE_TRANSFORMER_HPP

#include <tessera/nn/embedding.hpp>
#include <tessera/nn/head.hpp>
#include <tessera/nn/transformer_block.hpp>

namespace tessera::inline TESSERA_ABI::nn {

/// The units in the order in which they run. T is the storage type of weights and activations, G that of
/// gradients. Throws config_error for an impossible config.
template <exec::space Ex, storage_scalar T, storage_scalar G>
unit_list<Ex, T, G> make_transformer(transformer_config const& config, site where = site::here()) {
  config.validate(where);
  auto const gpt2 = config.family == transformer_family::gpt2;
  unit_list<Ex, T, G> units;
  units.push_back(std::make_unique<embedding<Ex, T, G>>(config));
  for (index_t layer = 0; layer < config.layers; ++layer)
    if (gpt2)
      units.push_back(std::make_unique<gpt2_block<Ex, T, G>>(config, layer));
    else
      units.push_back(std::make_unique<llama_block<Ex, T, G>>(config, layer));
  auto const& first = *units.front();
  if (gpt2)
    units.push_back(std::make_unique<head<Ex, T, G, layer_norm<Ex, T, G>>>(config, first));
  else
    units.push_back(std::make_unique<head<Ex, T, G, rms_norm<Ex, T, G>>>(config, first));
  return units;
}

} // namespace tessera::inline TESSERA_ABI::nn

#endif
