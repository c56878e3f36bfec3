/// How the dropouts of a model are numbered: 0 is the embedding's, 1 + 2 i and 2 + 2 i are those of block i's
/// branches. With the global sample number and a token's position it makes a mask that no split into
/// micro-batches or ranks changes.
#ifndef TESSERA_NN_DETAIL_DROPOUT_LAYERS_HPP
#define TESSERA_NN_DETAIL_DROPOUT_LAYERS_HPP

#include <tessera/nn/rank_group.hpp>
#include <tessera/nn/unit.hpp>
#include <tessera/ops/dropout.hpp>

namespace tessera::inline TESSERA_ABI::nn::detail {

/// Of this rank's rows of the residual stream.
template <class Group>
ops::dropout_options dropout_of(float probability, index_t layer, Group const& group, batch_shape shape,
                                pass const& p) {
  ops::dropout_options options{.probability = probability,
                               .seed = p.seed,
                               .step = p.step,
                               .layer = static_cast<std::uint64_t>(layer),
                               .first_sample = p.first_sample};
  auto const length = group.local_sequence(shape.sequence_length);
  if (length == 0) return options; // of no rows
  options.rows_per_sample = length;
  options.first_row = group.rows(shape.batch * length).begin;
  options.whole_rows_per_sample = shape.sequence_length;
  options.positions = group.positions(shape.sequence_length);
  return options;
}

template <class T, memory_space Memory>
view<T, 1, Memory> flat(view<T, 2, Memory> matrix) {
  return matrix.template reshape<1>({matrix.size()});
}

} // namespace tessera::inline TESSERA_ABI::nn::detail

#endif
