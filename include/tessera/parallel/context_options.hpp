/// What context parallelism needs to know beside the tensors of a call: the whole sequence's length, how it
/// is laid over the ranks, and what attention itself is told.
///
///     parallel::context_options options{.sequence_length = 8192};
///     auto mine = options.shards(comm.size()).positions(comm.rank());      // which rows are this rank's
#ifndef TESSERA_PARALLEL_CONTEXT_OPTIONS_HPP
#define TESSERA_PARALLEL_CONTEXT_OPTIONS_HPP

#include <tessera/layout/sequence_shards.hpp>

namespace tessera::inline TESSERA_ABI::parallel {

/// Keys and values round a ring, or heads against sequence: parallel/context_attention.hpp says when which.
enum class context_form : std::uint8_t { ring, exchange };

constexpr char const* name_of(context_form form) noexcept {
  return form == context_form::ring ? "ring" : "exchange";
}

/// The same on all ranks.
struct context_options {
  /// Of the whole sequence. Must be said.
  index_t sequence_length = -1;
  layout::sequence_assignment assignment = layout::sequence_assignment::zigzag;
  /// Factor on q k^T; 0 stands for 1 / sqrt(D).
  float scale = 0;
  /// Each query sees the keys at and before its own position; otherwise all keys.
  bool causal = true;

  constexpr layout::sequence_shards shards(int ranks) const noexcept {
    return {.length = sequence_length, .ranks = ranks, .assignment = assignment};
  }
};

/// The other sizes of a call, for its plan.
struct context_sizes {
  index_t batch = 0, heads = 0, key_heads = 0, head_width = 0;
};

} // namespace tessera::inline TESSERA_ABI::parallel

#endif
