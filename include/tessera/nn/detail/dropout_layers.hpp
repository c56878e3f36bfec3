/// How the dropouts of a model are numbered: 0 is the embedding's, 1 + 2 i and 2 + 2 i are those of block i's
/// branches. With the global sample number it makes a mask that no split into micro-batches or ranks changes.
#ifndef TESSERA_NN_DETAIL_DROPOUT_LAYERS_HPP
#define TESSERA_NN_DETAIL_DROPOUT_LAYERS_HPP

#include <tessera/nn/unit.hpp>
#include <tessera/ops/dropout.hpp>

namespace tessera::inline TESSERA_ABI::nn::detail {

inline ops::dropout_options dropout_of(float probability, index_t layer, batch_shape shape, pass const& p) {
  return {.probability = probability,
          .seed = p.seed,
          .step = p.step,
          .layer = static_cast<std::uint64_t>(layer),
          .first_sample = p.first_sample,
          .rows_per_sample = shape.sequence_length};
}

template <class T, memory_space Memory>
view<T, 1, Memory> flat(view<T, 2, Memory> matrix) {
  return matrix.template reshape<1>({matrix.size()});
}

} // namespace tessera::inline TESSERA_ABI::nn::detail

#endif
