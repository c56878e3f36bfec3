/// How a training run is laid over ranks, as one value: how many ranks each axis has, which part of the
/// state each of them keeps, how micro-batches go through the pipeline, and what is computed twice. It checks
/// itself against the model and the number of ranks; parallel/layout_text.hpp says and reads it in one line.
///
///     parallel::training_layout layout{.tensor = 2, .pipeline = 2, .zero = 3};
///     layout = layout.resolved(config, {.batch = 32, .ranks = 8});   // throws what must be changed, and how
///     layout.mesh();                                                 // data 2 x tensor 2 x pipeline 2
///
/// Every layout trains the same model, to rounding; with `reproducible`, data and pipeline axes of any size
/// give the same bits.
#ifndef TESSERA_PARALLEL_TRAINING_LAYOUT_HPP
#define TESSERA_PARALLEL_TRAINING_LAYOUT_HPP

#include <algorithm>
#include <limits>

#include <tessera/layout/mesh_shape.hpp>
#include <tessera/layout/schedule.hpp>
#include <tessera/nn/transformer_config.hpp>
#include <tessera/nn/unit.hpp>
#include <tessera/parallel/context_options.hpp>

namespace tessera::inline TESSERA_ABI::parallel {

using nn::recomputation;

/// What a layout is checked against.
struct layout_demands {
  index_t batch = 1; ///< Samples of a step, over all ranks.
  int ranks = 1;
};

struct training_layout {
  int data = 0;     ///< Ranks that take different samples; 0: as many as the other axes leave.
  int tensor = 1;   ///< Ranks that share each matrix.
  int pipeline = 1; ///< Ranks (stages) that share the units.
  int context = 1;  ///< Ranks that share each sequence.

  /// ZeRO: 0 keeps everything on each rank of data x context; 1 shares the optimizer's state among them, 2
  /// the gradients too, 3 the weights too.
  int zero = 1;
  /// Hybrid sharding: this many neighbours of data x context share among themselves, and replicate what the
  /// other groups do. 0: all of them share.
  int shard_group = 0;
  /// The tensor ranks share the rows between matrices as well: norms, residual sums, dropout.
  bool sequence_parallel = false;

  context_form form = context_form::ring;
  layout::sequence_assignment assignment = layout::sequence_assignment::zigzag;

  layout::schedule_kind schedule = layout::schedule_kind::one_forward_one_backward;
  int chunks = 1; ///< Parts of the model on each stage; more than 1 with the interleaved schedule alone.

  index_t micro_batch = 0; ///< Samples that go through the model together; 0: all that a data rank has.
  recomputation recompute = recomputation::none;
  /// Sums over micro-batches and ranks are one fixed binary tree.
  bool reproducible = false;

  friend constexpr bool operator==(training_layout const&, training_layout const&) = default;

  /// Of a resolved layout.
  constexpr layout::mesh_shape mesh() const noexcept {
    return {.pipeline = pipeline, .data = data, .context = context, .tensor = tensor};
  }
  /// Ranks over which gradients are summed.
  constexpr int gradient_ranks() const noexcept { return data * context; }
  constexpr int ranks() const noexcept { return pipeline * data * context * tensor; }
  /// Parts of the model, of which each stage has `chunks`.
  constexpr int parts() const noexcept { return pipeline * chunks; }

  /// Samples of a step that data rank `d` takes, and their micro-batches. Every data rank has the same number
  /// of micro-batches, so that all issue the same collectives; some may be empty.
  constexpr layout::range share(index_t batch, int d) const { return layout::shard_of(batch, data, d); }
  constexpr index_t micro_batches(index_t batch) const {
    auto const most = share(batch, 0).size();
    return most == 0 ? 1 : (most + micro_batch - 1) / micro_batch;
  }
  constexpr layout::range micro_batch_of(index_t batch, int d, index_t number) const {
    auto const mine = share(batch, d);
    auto const at = [&](index_t n) { return (std::min)(mine.begin + n * micro_batch, mine.end); };
    return {at(number), at(number + 1)};
  }

  /// This layout with `data` and `micro_batch` filled in, the latter no larger than a data rank's samples.
  /// Throws config_error where the model, the batch or
  /// the number of ranks does not allow it; the message says what to change.
  training_layout resolved(nn::transformer_config const& config, layout_demands const& on,
                           site where = site::here()) const {
    auto all = *this;
    all.check_values(where);
    all.fill_data(on.ranks, where);
    all.check_options(where);
    auto const most = (std::max)(index_t{1}, all.share(on.batch, 0).size());
    if (all.micro_batch == 0 || (all.micro_batch > most && !all.reproducible)) all.micro_batch = most;
    all.check_model(config, where);
    if (reproducible) all.check_reproducible(config, on.batch, where);
    return all;
  }

private:
  static constexpr int most_ranks = 1 << 15; ///< Along one axis, so that no product overflows.

  void check_values(site where) const {
    auto const at_least = [&](char const* name, index_t value, index_t least, index_t most = most_ranks) {
      if (value < least)
        throw config_error("E-parallel-070", where, "layout: ", name, " is ", value, "; set it to ", least,
                           " or more");
      if (value > most)
        throw config_error("E-parallel-070", where, "layout: ", name, " is ", value, "; set it to ", most,
                           " or less");
    };
    at_least("data", data, 0);
    at_least("tensor", tensor, 1);
    at_least("pipeline", pipeline, 1);
    at_least("context", context, 1);
    at_least("zero", zero, 0);
    at_least("shard_group", shard_group, 0);
    at_least("chunks", chunks, 1);
    at_least("micro_batch", micro_batch, 0, (std::numeric_limits<index_t>::max)());
    if (zero > 3)
      throw config_error("E-parallel-070", where, "layout: zero is ", zero, "; its stages are 0 to 3");
  }

  void fill_data(int ranks, site where) {
    auto const others = index_t{tensor} * pipeline * context;
    if (data == 0) {
      if (ranks < 1 || ranks % others != 0)
        throw config_error("E-parallel-071", where, "layout: tensor ", tensor, " x pipeline ", pipeline,
                           " x context ", context, " = ", others, " ranks do not divide the ", ranks,
                           " that there are; start ", (ranks / others + 1) * others,
                           ", or choose axes whose product divides ", ranks);
      data = narrow<int>(ranks / others);
    } else if (data * others != ranks) {
      throw config_error("E-parallel-071", where, "layout: ", text_of(mesh()), " takes ", data * others,
                         " ranks, and there are ", ranks, "; start ", data * others,
                         ", or leave data at 0, which takes what the other axes leave");
    }
  }

  /// Nothing is ignored: a choice that has no meaning here is a mistake.
  void check_options(site where) const {
    auto const refuse = [&](auto const&... parts) {
      throw config_error("E-parallel-072", where, "layout: ", parts...);
    };
    if (sequence_parallel && tensor == 1)
      refuse(
          "sequence_parallel shares rows among the tensor ranks, and tensor is 1; set tensor to 2 or more, "
          "or sequence_parallel to false");
    if (context == 1 && form != context_form::ring)
      refuse("context_form is ", name_of(form),
             ", and context is 1; set context to 2 or more, or leave it "
             "at ring");
    if (context == 1 && assignment != layout::sequence_assignment::zigzag)
      refuse("context_shards is ", name_of(assignment),
             ", and context is 1; set context to 2 or more, or leave it at zigzag");
    using kind = layout::schedule_kind;
    if (pipeline == 1 && schedule != kind::one_forward_one_backward)
      refuse("schedule is ", name_of(schedule),
             ", and pipeline is 1; set pipeline to 2 or more, or leave it "
             "at one_forward_one_backward");
    auto const interleaved = schedule == kind::interleaved_one_forward_one_backward;
    if (interleaved && chunks == 1)
      refuse("the interleaved schedule has 1 chunk a stage; set chunks to 2 or more, or schedule to "
             "one_forward_one_backward");
    if (!interleaved && chunks > 1)
      refuse("chunks is ", chunks, ", and schedule ", name_of(schedule),
             " has 1; set chunks to 1 or schedule to interleaved");
    if (shard_group != 0 && zero == 0)
      refuse("shard_group is ", shard_group,
             ", and ZeRO stage 0 shares nothing; set zero to 1, 2 or 3, or "
             "shard_group to 0");
    if (shard_group != 0 && gradient_ranks() % shard_group != 0)
      refuse("shard_group ", shard_group, " does not divide data ", data, " x context ", context, " = ",
             gradient_ranks(), " ranks; set it to a divisor of ", gradient_ranks());
  }

  void check_model(nn::transformer_config const& config, site where) const {
    auto const refuse = [&](auto const&... parts) {
      throw config_error("E-parallel-073", where, "layout: ", parts...);
    };
    auto const heads = config.heads, shared = config.kv_heads();
    if (heads % tensor != 0)
      refuse("tensor ", tensor, " does not divide heads ", heads,
             "; set tensor to a divisor of it, or heads "
             "to ",
             (heads / tensor + 1) * tensor);
    if (shared % tensor != 0 && tensor % shared != 0)
      refuse("tensor ", tensor, " and key_value_heads ", shared,
             ": one must divide the other; set "
             "key_value_heads to ",
             tensor, " or to a divisor or multiple of it");
    if (config.layers < parts())
      refuse(config.layers, " layers cannot be shared among pipeline ", pipeline, " x chunks ", chunks, " = ",
             parts(), " parts; set layers to ", parts(), " or more, or lower pipeline or chunks");
    auto const zigzag = assignment == layout::sequence_assignment::zigzag;
    auto const pieces = context == 1 ? 1 : zigzag ? 2 * context : context;
    if (config.sequence_length < pieces)
      refuse("sequence_length ", config.sequence_length, " cannot be cut into the ", pieces,
             " pieces of context ", context, zigzag ? " (two a rank with zigzag)" : "",
             "; lengthen it or lower context");
    if (context > 1 && form == context_form::exchange) {
      auto const here = heads / tensor, shared_here = (std::max)(index_t{1}, shared / tensor);
      if (here % context != 0)
        refuse("context_form exchange gives each of ", context, " context ranks a share of the ", here,
               " heads that a tensor rank has, which ", context,
               " does not divide; set context_form to ring, "
               "or heads to a multiple of ",
               tensor * context);
      if (shared_here % context != 0 && context % shared_here != 0)
        refuse(
            "context_form exchange with context ", context, " and ", shared_here,
            " key_value_heads a tensor rank: one must divide the other; set context_form to ring or change "
            "key_value_heads");
    }
  }

  /// The tree over a step's micro-batches is that of one rank where each data rank holds one of its subtrees
  /// and nothing else adds up over ranks.
  void check_reproducible(nn::transformer_config const& config, index_t batch, site where) const {
    auto const refuse = [&](auto const&... parts) {
      throw config_error("E-parallel-074", where, "layout: reproducible ", parts...);
    };
    if (tensor > 1 || context > 1)
      refuse("with tensor ", tensor, " and context ", context,
             ": these cut the sums inside the model, whose "
             "rounding then depends on them; set both to 1 and use data and pipeline");
    if (schedule == layout::schedule_kind::zero_bubble)
      refuse("with schedule zero bubble: it begins the gradients of a micro-batch before those of the one "
             "before are complete; set schedule to one_forward_one_backward");
    if (pipeline > 1 && config.tied_head)
      refuse("with pipeline ", pipeline,
             " and a tied head: the table's two gradients are made on two stages ",
             "and meet after their sums; set tied_head to false, or pipeline to 1");
    if (batch % (data * micro_batch) != 0)
      refuse("gives every data rank the same number of whole micro-batches, and batch ", batch,
             " is not a "
             "multiple of data ",
             data, " x micro_batch ", micro_batch, "; ",
             (batch / (data * micro_batch) + 1) * data * micro_batch, " would be");
    auto const here = micro_batches(batch);
    if (data > 1 && (here & (here - 1)) != 0)
      refuse(
          "gives a data rank a whole branch of the tree over micro-batches, and ", here,
          " micro-batches are none: choose batch, data and micro_batch so that batch / (data x micro_batch) "
          "is a power of two");
  }
};

} // namespace tessera::inline TESSERA_ABI::parallel

#endif
