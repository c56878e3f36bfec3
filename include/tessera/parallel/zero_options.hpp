/// What parallel/zero.hpp is told: the units of this rank, the groups of ranks, the stage and its bounds, and
/// what an update takes and returns.
#ifndef TESSERA_PARALLEL_ZERO_OPTIONS_HPP
#define TESSERA_PARALLEL_ZERO_OPTIONS_HPP

#include <functional>
#include <optional>

#include <tessera/comm/communicator.hpp>
#include <tessera/core/memory.hpp>
#include <tessera/exec/space.hpp>
#include <tessera/layout/parameters.hpp>
#include <tessera/nn/unit.hpp>
#include <tessera/optim/decay.hpp>

namespace tessera::inline TESSERA_ABI::parallel {

/// The communicator's messages stand in the memory that the space works in: comm::nccl goes with exec::cuda,
/// the others with exec::host.
template <class Comm, class Ex>
concept communicates_for = comm::communicator<Comm> && exec::space<Ex> &&
    std::same_as<typename Comm::bulk_memory, typename Ex::memory>;

inline constexpr auto no_unit = static_cast<std::size_t>(-1);

/// One block of parameters that this rank holds, or holds a shard of.
struct zero_unit {
  layout::parameter_map const* map = nullptr; ///< Outlives what is made from it.
  bool owned = true;          ///< False: a copy of a block of another pipeline stage (a tied embedding on the
                              ///< last stage); its owner keeps the optimizer's state and counts it.
  std::size_t tied = no_unit; ///< The unit of the same list whose block this one also reads, and whose
                              ///< gradient it also writes.
  std::size_t number = no_unit; ///< In the whole model, all stages together; no_unit: as in the list.
};

/// The groups that a rank belongs to. All of them outlive what is made from them; one communicator may serve
/// as several.
template <comm::communicator Comm>
struct zero_ranks {
  /// The first and the last stage of a pipeline, which hold the same block.
  struct tie {
    Comm* pipeline = nullptr;
    int peer = 0;               ///< The other one's rank in `pipeline`.
    std::size_t unit = no_unit; ///< This rank's number for the block.
  };

  Comm& gradients;          ///< Over which gradients are summed and everything is shared: data x context.
  Comm& world;              ///< All ranks: loss, count, norm, and whether the step is taken.
  Comm* replicas = nullptr; ///< Hybrid sharding: the ranks of other groups that hold the same shard.
  Comm* tensor = nullptr;   ///< Adds the summands of `partial` parameters; counts copies once.
  std::optional<tie> shared_block{};
};

/// The sizes of those groups: what a plan needs to know.
struct zero_group_sizes {
  int rank = 0, ranks = 1; ///< Of the group over which gradients are summed.
  int replicas = 1;
  int tensor = 1;
  int world = 1;
  std::size_t shared_block = no_unit; ///< zero_ranks::tie::unit.
};

struct zero_options {
  int stage = 1;                           ///< 0 to 3.
  index_t bucket_bytes = index_t{4} << 20; ///< Stage 0: units are reduced together until they are this large.
  int in_flight = 2;                       ///< Reductions, and gathers after an update, under way at once.
  int open_units = 1; ///< Units whose gradients are being written at once: all of a stage's where backwards
                      ///< come in two parts and the second waits, otherwise 1.
  int prefetch = 1;   ///< Stage 3: units gathered ahead of their use, 0 or 1.
  comm::summation order = comm::summation::rank_order;
  /// The same global batch gives the same bits on any number of gradient ranks: see parallel/zero.hpp.
  bool reproducible = false;
  index_t micro_batches = 1; ///< Of a rank in a step, at most; only the reproducible mode's plan needs it.
  optim::decay_rule decay{};
  /// True for parameters that keep their values: they have no state and count in no norm.
  std::function<bool(layout::parameter const&)> frozen{};
  memory_meter* meter = nullptr;

  /// Throws config_error (E-parallel-002) for a stage or bounds that do not exist.
  void validate(site where = site::here()) const {
    if (stage < 0 || stage > 3 || bucket_bytes < 1 || in_flight < 1 || open_units < 1 || prefetch < 0 ||
        prefetch > 1 || micro_batches < 1)
      throw config_error("E-parallel-002", where, "zero: stage is ", stage, " (0 to 3), bucket_bytes ",
                         bucket_bytes, ", in_flight ", in_flight, ", open_units ", open_units,
                         " and micro_batches ", micro_batches, " (1 or more), prefetch ", prefetch,
                         " (0 or 1)");
  }
};

/// How blocks are lent.
struct lend_options {
  /// The unit whose weights will be lent after this, as on every rank of the group.
  std::size_t next = no_unit;
  /// Whether the gradients are lent too: for a backward, and for the forward of the last unit.
  bool gradients = true;
  /// Whether the weights are lent: a backward's part `weights` reads none, and stage 3 then gathers none.
  bool weights = true;
  index_t micro_batch = 0; ///< Number on this rank, in this step; compared in the reproducible mode.
};

struct update_options {
  index_t step = 1;         ///< Number of this update, from 1.
  double learning_rate = 0; ///< Of this update.
  double clip_norm = 0;     ///< The longest gradient of the mean loss; 0: no clipping.
  double loss_scale = 1;    ///< What the gradients were multiplied by (pass::gradient_scale).
};

/// The same on every rank, bit by bit.
struct update_result {
  nn::loss_sum loss;        ///< Over all micro-batches of all ranks.
  double gradient_norm = 0; ///< Of the gradient of the mean loss, before clipping.
  /// False where loss or gradients are infinite or NaN, or nothing was predicted: then neither weights nor
  /// state have changed on any rank.
  bool applied = false;
};

} // namespace tessera::inline TESSERA_ABI::parallel

#endif
