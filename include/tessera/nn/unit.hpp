/// A model is a sequence of units: the embedding, each transformer block, the head. A unit describes one flat
/// block of parameters and knows a forward and a backward over it; it does not hold the block. Whoever runs
/// the model lends blocks, activation memory and caches to units, so that sharding, gathering, recomputing or
/// moving parameters needs no word in any layer. nn/model.hpp is the plainest runner:
///
///     stream<Ex, T> s{.tokens = tokens, .targets = targets};
///     for (i = 0, 1, ...) units[i]->forward(ex, blocks[i], s, memory, pass);         // then there is a loss
///     for (i = last, ..., 0) units[i]->backward(ex, blocks[i], s, memory, pass);     // and gradients
#ifndef TESSERA_NN_UNIT_HPP
#define TESSERA_NN_UNIT_HPP

#include <memory>
#include <string>
#include <vector>

#include <tessera/core/arena.hpp>
#include <tessera/core/memory_span.hpp>
#include <tessera/core/scalar.hpp>
#include <tessera/exec/space.hpp>
#include <tessera/layout/parameters.hpp>

namespace tessera::inline TESSERA_ABI::nn {

/// Sizes of a micro-batch, the same on all ranks that share it. How many of its tokens and rows are here is
/// the rank group's to say (nn/rank_group.hpp).
struct batch_shape {
  index_t batch = 0;           ///< Samples.
  index_t sequence_length = 0; ///< Tokens of a whole sample.

  constexpr index_t tokens() const noexcept { return batch * sequence_length; }
  friend constexpr bool operator==(batch_shape const&, batch_shape const&) = default;
};

/// Losses add up: a sum over predicted tokens, in nats, and their count. Nothing is divided before all
/// micro-batches of all ranks are in; a count of zero is legal.
struct loss_sum {
  double sum = 0;
  double count = 0;

  constexpr loss_sum& operator+=(loss_sum other) noexcept {
    sum += other.sum;
    count += other.count;
    return *this;
  }
};

/// What a unit's backward computes again instead of keeping it: nothing; what attention made; all within the
/// unit but its input.
enum class recomputation : std::uint8_t { none, attention, unit };

constexpr char const* name_of(recomputation what) noexcept {
  constexpr char const* names[] = {"none", "attention", "unit"};
  return names[static_cast<int>(what)];
}

/// A backward in one call, or in two: the gradient of the input, which the unit before waits for, and later
/// those of the parameters.
enum class backward_part : std::uint8_t { both, input, weights };

/// What forward and backward of one micro-batch agree on.
struct pass {
  std::uint64_t seed = 0;   ///< Of the run; keys dropout together with step, layer and global sample.
  std::uint64_t step = 0;   ///< Optimizer step.
  index_t first_sample = 0; ///< Number of the micro-batch's first sample within the step's global batch.
  bool training = true;     ///< False: no dropout, nothing is kept for a backward.
  bool accumulate = false;  ///< True: add to the gradient blocks; false: overwrite them.
  float gradient_scale = 1; ///< Factor on the gradient of the loss sum (fp16 loss scaling).
  int slot = 0;             ///< Which of the micro-batches in flight this is; see unit::reserve.
  backward_part part = backward_part::both; ///< Of the backward; a forward does not read it.
};

/// How the residual stream and its gradient are stored, whatever T is. Every layer adds to them, and 16 bits
/// would round each sum; T is what matrix products read, and what of them is kept for a backward.
using residual_scalar = float;

template <memory_space Memory>
using residual_rows = view<residual_scalar, 2, Memory>;

/// What flows between units.
template <exec::space Ex, storage_scalar T>
struct stream {
  using memory = typename Ex::memory;

  view<std::int32_t const, 2, memory> tokens = {};  ///< [batch, tokens of a sample that are here]
  view<std::int32_t const, 2, memory> targets = {}; ///< The same; `ops::ignore_index` predicts nothing.
  index_t whole_length = 0; ///< Tokens of a whole sample where other ranks hold some; 0: all are here.
  /// [rows, width]; forward replaces it by the unit's output. Rows are the tokens, under sequence parallelism
  /// this tensor rank's part of them.
  residual_rows<memory> hidden = {};
  /// [rows, width]; backward turns the gradient of the unit's output into that of its input, in place.
  residual_rows<memory> gradient = {};
  /// {sum, count}: the head's forward adds to them where the space runs, and nobody waits. Empty: it waits,
  /// and adds to `loss`. Of tensor ranks, which all have the same loss, the first alone adds.
  view<double, 1, memory> totals = {};
  loss_sum loss = {};

  // Lent by a decoder, which feeds a few tokens at a time; empty otherwise.
  index_t first_position = 0;         ///< Position of the first token of each sample.
  view<T, 3, memory> keys = {};       ///< [batch, capacity, cache_width()] of the unit that runs.
  view<T, 3, memory> values = {};     ///< The same.
  view<float, 2, memory> logits = {}; ///< [batch, vocabulary]: the head leaves the last token's, no loss.

  batch_shape shape() const noexcept {
    return {tokens.extent(0), whole_length > 0 ? whole_length : tokens.extent(1)};
  }
};

/// One step of the model. T is the storage type of weights and activations, G that of the weights' gradients.
template <exec::space Ex, storage_scalar T, storage_scalar G>
class unit {
public:
  using memory = typename Ex::memory;

  /// The parameters that a call works on. All spans have the size of the block of the map they belong to.
  struct blocks {
    memory_span<T const, memory> weights;
    memory_span<G, memory> gradients; ///< Empty outside training. The head writes its own in its forward.
    memory_span<T const, memory>
        tied_weights; ///< The block of the unit named by `tied_to`, where there is one.
    memory_span<G, memory>
        tied_gradients; ///< A tied gradient is written before its owner's backward, which adds.
  };

  virtual ~unit() = default;

  virtual std::string const& name() const = 0;
  virtual layout::parameter_map const& parameters() const = 0;

  /// The name of an earlier unit whose block this unit also reads (a tied head), or empty.
  virtual std::string const& tied_to() const = 0;

  /// Prepares for `micro_batches` forwards that wait for their backwards at once (pass::slot below it).
  virtual void reserve(int micro_batches) = 0;

  /// From the next forward on, keeps that much less and lets backward compute it again: by itself, with the
  /// same dropout, from the input that stays anyhow and the weights that it is lent. The results are the same
  /// bits. A unit that keeps nothing it could compute again (embedding, head) stays as it is.
  virtual void recompute(recomputation what) = 0;

  /// Bytes that a training forward takes from the arena and keeps for its backward, its output included. Its
  /// input, s.hidden as it came, must stay as well; the runner releases both after the backward.
  virtual index_t kept_bytes(batch_shape shape) const = 0;
  /// Further bytes that a backward of part `input` takes from the arena and keeps for part `weights`; what
  /// the forward kept, and the input, stay until then, too.
  virtual index_t kept_for_weights_bytes(batch_shape shape) const = 0;
  /// Further bytes that forward or backward, or a part of it, takes and gives back before it returns. A
  /// forward that does not train keeps its output only: no more than kept and scratch bytes together, of
  /// which all but the embedding's output are given back.
  virtual index_t scratch_bytes(batch_shape shape) const = 0;
  /// Elements of a token's keys, and of its values, that decoding keeps; 0 for a unit without attention.
  virtual index_t cache_width() const { return 0; }

  /// Reads s.hidden (s.tokens in the first unit), leaves its output in s.hidden.
  virtual void forward(Ex& ex, blocks const& parameters, stream<Ex, T>& s, arena<memory>& activations,
                       pass const& p) = 0;
  /// Turns s.gradient into the gradient of its input and writes, or adds, the parameters' gradients. In two
  /// calls: part `input` does the former, and what costs no product of matrices of the latter (norms, the
  /// embedding); part `weights` writes or adds the rest, and reads neither weights nor the stream's hidden
  /// and gradient. Both are lent gradients, and both see one pass::accumulate: false in the first micro-batch
  /// of a step. The two parts give the bits of one call.
  virtual void backward(Ex& ex, blocks const& parameters, stream<Ex, T>& s, arena<memory>& activations,
                        pass const& p) = 0;
};

/// A model's units in the order in which they run.
template <exec::space Ex, storage_scalar T, storage_scalar G>
using unit_list = std::vector<std::unique_ptr<unit<Ex, T, G>>>;

} // namespace tessera::inline TESSERA_ABI::nn

#endif
