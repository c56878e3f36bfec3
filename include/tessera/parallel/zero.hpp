/// ZeRO (Rajbhandari et al., 2020) over units: owns weights, gradients and optimizer state of this rank's
/// units, or its shards of them, lends blocks to whoever runs the units, sums gradients over the ranks while
/// backward goes on, and ends the step with the same weights on every rank, bit by bit.
///
///     parallel::zero<comm::mpi, exec::host, bf16, float> state(
///         {.gradients = comm, .world = comm}, ex, units, optim::adamw_options{}, {.stage = 3});
///     auto lent = state.lend(ex, u, {.next = u + 1, .gradients = false});           // forward ...
///     units[u]->forward(ex, lent, stream, memory, {.accumulate = state.accumulates(micro_batch)});
///     state.done(u);
///     lent = state.lend(ex, u, {.next = u - 1});                                    // ... and backward
///     units[u]->backward(ex, lent, stream, memory, pass);
///     state.gradients_ready(ex, u, is_last_micro_batch);
///     state.done(u);
///     auto result = state.update(ex, loss, {.step = step + 1, .learning_rate = rate, .clip_norm = 1});
///
/// Stages. 0: every rank keeps everything; gradients by all_reduce, one message a bucket. 1: each keeps the
/// optimizer's state of the part of every unit that it owns (layout::ownership); reduce_scatter_v to it, and
/// all_gather_v of the new weights. 2: of the gradients too; each micro-batch writes blocks of zeros, which
/// go to their owners while backward goes on and are then used again. 3: of the weights too; a unit is
/// gathered before it is used and given back after it, and the next one is on its way meanwhile. Parts may be
/// uneven or empty. With `replicas`, what is owned is added up over those after the last micro-batch.
///
/// Reproducible: the same global batch, micro-batch by micro-batch, gives the same bits of loss, norm and
/// weights on any number of gradient ranks, for any number of pipeline stages (of a model without a tied
/// head, whose table gets its gradient on two stages). Micro-batch i of rank r is number
/// r * micro_batches + i, and the sum is one binary tree over these numbers; every rank has as many,
/// a power of two where there are several ranks. It costs log2(micro_batches) further blocks of gradients a
/// unit (a whole one each, also at stages 2 and 3, which send nothing before the last micro-batch), one more
/// pass over them a micro-batch, and 512 bytes a unit and rank for the norm.
///
/// Cost of a step of n weights with one micro-batch: stage 0 an all_reduce of n gradients; 1 and 2 a
/// reduce_scatter and, of weights, an all_gather; 3 a reduce_scatter and two all_gathers, one fewer for the
/// last unit (a tied block stays from the last unit to its own backward). Every rank issues the same
/// collectives whatever its samples; one that has none runs empty micro-batches, or, in the plain order of
/// units, calls `nothing_to_add`.
#ifndef TESSERA_PARALLEL_ZERO_HPP
#define TESSERA_PARALLEL_ZERO_HPP

#include <algorithm>

#include <tessera/core/tensor.hpp>
#include <tessera/ops/cast.hpp>
#include <tessera/optim/adamw.hpp>
#include <tessera/parallel/detail/gathered_weights.hpp>
#include <tessera/parallel/detail/gradient_sums.hpp>
#include <tessera/parallel/detail/shared_block.hpp>
#include <tessera/parallel/detail/step_sums.hpp>
#include <tessera/parallel/detail/zero_plan.hpp>

namespace tessera::inline TESSERA_ABI::parallel {

template <comm::communicator Comm, exec::space Ex, storage_scalar T, storage_scalar G,
          class Optimizer = optim::adamw<Ex, T>>
  requires communicates_for<Comm, Ex> && optim::optimizer<Optimizer, Ex, T, G>
class zero {
public:
  using memory = typename Ex::memory;
  using optimizer_options = typename Optimizer::options_type;
  using blocks = typename nn::unit<Ex, T, G>::blocks;

  /// A stretch of a unit's block whose optimizer state this rank keeps: one for each unit, unless something
  /// in it is frozen or none of it is this rank's.
  struct stretch {
    layout::range where;
    Optimizer optimizer;
  };

  /// Called by all ranks of the groups. Weights begin as zeros: `start_from` sets them. Throws config_error
  /// for options or units that do not fit together (E-parallel-002, 010, 011), and for a reproducible sum
  /// without a tree (E-parallel-014).
  zero(zero_ranks<Comm> ranks, Ex& ex, std::vector<zero_unit> const& units, optimizer_options const& settings,
       zero_options options = {}, site where = site::here())
      : ranks_(ranks), options_(checked(ranks, static_cast<zero_options&&>(options), where)),
        who_(detail::ownership_of(ranks.gradients.rank(), ranks.gradients.size(), options_)),
        parts_(detail::parts_of(units, who_, options_, where)),
        gradients_(ranks, who_, parts_, options_, shared_here(), where),
        gathered_(ranks.gradients, who_, parts_, options_), sums_(ranks, who_, parts_, options_, where),
        shared_(ranks, parts_, options_, where), under_way_(options_.in_flight),
        counts_(static_cast<std::size_t>(who_.ranks)) {
    index_t end = 0;
    places_.reserve(parts_.size());
    for (std::size_t u = 0; u < parts_.size(); ++u)
      if (parts_[u].given.owned) order_.push_back(u);
    stretches_.resize(parts_.size());
    for (std::size_t u = 0; u < parts_.size(); ++u) {
      places_.push_back({end, end + parts_[u].weights.size()});
      end = places_.back().end;
      stretches_[u].reserve(parts_[u].updated.size());
      auto const decayed = optim::decayed_ranges(*parts_[u].given.map, options_.decay);
      for (auto const& r : parts_[u].updated)
        stretches_[u].push_back({r, Optimizer(ex, r.size(), settings, optim::ranges_within(decayed, r),
                                              {options_.meter, memory_kind::optimizer_state})});
    }
    weights_ = tensor<T, 1, memory>({end}, {options_.meter, memory_kind::parameters}, where);
  }
  zero(zero const&) = delete;
  zero& operator=(zero const&) = delete;

  /// What a rank will keep and, for communication, keep at most.
  static memory_plan plan(std::span<zero_unit const> units, zero_group_sizes const& who,
                          optimizer_options const& settings, zero_options const& options = {},
                          site where = site::here()) {
    options.validate(where);
    return detail::plan_of<Comm, T, G>(units, who, Optimizer::state_bytes(settings), options, where);
  }
  memory_plan plan(optimizer_options const& settings, site where = site::here()) const {
    std::vector<zero_unit> units;
    for (auto const& part : parts_) units.push_back(part.given);
    return plan(units, sizes_of(ranks_), settings, options_, where);
  }
  static zero_group_sizes sizes_of(zero_ranks<Comm> const& ranks) {
    return {.rank = ranks.gradients.rank(),
            .ranks = ranks.gradients.size(),
            .replicas = ranks.replicas == nullptr ? 1 : ranks.replicas->size(),
            .tensor = ranks.tensor == nullptr ? 1 : ranks.tensor->size(),
            .world = ranks.world.size(),
            .shared_block = ranks.shared_block ? ranks.shared_block->unit : no_unit};
  }

  std::size_t units() const noexcept { return parts_.size(); }
  layout::parameter_map const& parameters(std::size_t u) const { return *parts_[u].given.map; }
  zero_options const& options() const noexcept { return options_; }
  zero_ranks<Comm> const& ranks() const noexcept { return ranks_; }

  // What a checkpoint saves and restores. Ranges count from the beginning of the unit's block.

  /// The part of unit `u`'s weights that is on this rank, and those weights.
  layout::range weights_at(std::size_t u) const { return parts_[u].weights; }
  memory_span<T, memory> weights(std::size_t u) { return part_of(weights_.span(), places_[u]); }
  /// The part of unit `u` that this rank counts: of all ranks that hold the block one counts each element,
  /// save for parameters that tensor ranks hold copies of (layout::counts).
  layout::range counted(std::size_t u) const {
    auto const mine = who_.of(parts_[u].size);
    auto const copy = !parts_[u].given.owned || (ranks_.replicas != nullptr && ranks_.replicas->rank() != 0);
    return copy ? layout::range{mine.begin, mine.begin} : mine;
  }
  /// The state that this rank keeps of unit `u`.
  std::span<stretch> stretches(std::size_t u) { return stretches_[u]; }

  /// Lets the fp32 masters start anew from the weights as they are: after these were set from outside.
  void start_from_weights(Ex& ex) {
    for (std::size_t u = 0; u < units(); ++u)
      for (auto& each : stretches_[u])
        each.optimizer.start_from(ex, memory_span<T const, memory>(weights_of(u, each.where)));
  }

  /// Sets weights and masters from values known in fp32: `fill(unit, range of its block, out)` writes them.
  template <std::invocable<std::size_t, layout::range, memory_span<float, typename Ex::memory>> Fill>
  void start_from(Ex& ex, Fill&& fill) {
    index_t largest = 0;
    for (auto const& part : parts_) largest = (std::max)(largest, part.weights.size());
    tensor<float, 1, memory> values({largest}, {options_.meter, memory_kind::other});
    for (std::size_t u = 0; u < units(); ++u) {
      auto const held = parts_[u].weights;
      auto const exact = part_of(values.span(), {0, held.size()});
      fill(u, held, exact);
      ops::cast(ex, view<T, 1, memory>(weights(u).data(), {held.size()}),
                view<float, 1, memory>(exact.data(), {held.size()}));
      for (auto& each : stretches_[u])
        each.optimizer.start_from(
            ex, memory_span<float const, memory>(
                    part_of(exact, {each.where.begin - held.begin, each.where.end - held.begin})));
    }
  }

  /// What pass::accumulate must be in micro-batch `number` of this rank's step, from 0.
  bool accumulates(index_t number) const noexcept { return options_.stage >= 2 || number > 0; }

  /// Everything that unit `u` works on; `done(u)` gives it back, where weights are part of it. Called by all
  /// gradient ranks for the same units in the same order, with the same `next`. Throws config_error where too
  /// much is lent at once (E-parallel-012), or gradients are written in an order that the reproducible mode
  /// cannot add up in (E-parallel-013).
  blocks lend(Ex& ex, std::size_t u, lend_options const& how = {}, site where = site::here()) {
    require_unit(u, where);
    auto const tied = parts_[u].given.tied;
    blocks lent;
    if (how.weights) {
      if (options_.stage == 3) {
        gathered_.keep(u, false);
        keep_tied(u, how.gradients);
        gather(u, how.next, where);
      }
      lent.weights = borrowed(u);
      if (tied != no_unit) lent.tied_weights = borrowed(tied);
    }
    if (how.gradients) {
      lent.gradients = gradients_.lend(ex, u, how.micro_batch, where);
      if (tied != no_unit) lent.tied_gradients = gradients_.lend(ex, tied, how.micro_batch, where);
    }
    return lent;
  }
  /// Throws config_error (E-parallel-015) for a unit that is not lent.
  void done(std::size_t u, site where = site::here()) {
    require_unit(u, where);
    if (options_.stage < 3) return;
    if (gathered_.users(u) == 0)
      throw config_error("E-parallel-015", where, "done(", u, "): that unit is not lent; call it once for ",
                         "each lend");
    gathered_.done(u);
    if (parts_[u].given.tied != no_unit) gathered_.done(parts_[u].given.tied);
  }

  /// Unit `u`'s backward of a micro-batch has ended; `last`: of this step's last one on this rank. Gradients
  /// that nobody wrote to are zeros. Starts what can be reduced and drives what is under way. Throws
  /// config_error (E-parallel-003) for a unit that is not awaited.
  void gradients_ready(Ex& ex, std::size_t u, bool last = true, site where = site::here()) {
    require_unit(u, where);
    gradients_.ready(ex, u, last, where);
    auto const tied = parts_[u].given.tied; // a borrowed block has no backward of its own
    if (tied != no_unit && !parts_[tied].given.owned) gradients_.ready(ex, tied, last, where);
  }

  /// A micro-batch without samples: takes part in the collectives of ranks that run the units in the plain
  /// order, forward from the first to the last, which stays lent, then backward, each lent with the unit that
  /// comes after it as `next`, and before the one before is done.
  void nothing_to_add(Ex& ex, bool last = true, site where = site::here()) {
    auto const& order = order_;
    auto const end = order.size();
    auto const next_of = [&](std::size_t i, bool forward) {
      if (forward && i + 1 < end) return order[i + 1];
      return i > 0 ? order[i - 1] : no_unit;
    };
    for (std::size_t i = 0; i < end; ++i) {
      (void)lend(ex, order[i], {.next = next_of(i, true), .gradients = false}, where);
      if (i + 1 < end)
        done(order[i], where);
      else
        keep_tied(order[i], true);
    }
    for (auto i = end; i-- > 0;) {
      if (i + 1 < end) (void)lend(ex, order[i], {.next = next_of(i, false), .gradients = false}, where);
      gradients_ready(ex, order[i], last, where);
      done(order[i], where);
    }
  }

  /// Ends the step: waits for the gradients, decides with all ranks whether they are finite, clips, updates,
  /// and brings the weights to all ranks that keep them. `losses` is what this rank's micro-batches gave, in
  /// order, or their sum; the reproducible mode needs each. The gradients are divided here, once, by the
  /// count of all ranks. Throws config_error where some unit's gradients were never ready (E-parallel-004) or
  /// a unit is still lent (E-parallel-015).
  update_result update(Ex& ex, std::span<nn::loss_sum const> losses, update_options const& how,
                       site where = site::here()) {
    require_complete(losses, where);
    gradients_.finish(ex);
    if (ranks_.replicas != nullptr) add_up_replicas(where);
    shared_.add_up_gradients(
        ex, [&](std::size_t u) { return gradients_.share(u); }, where);

    auto const totals = sums_.add_up(
        ex, losses, [&](std::size_t u) { return gradients_.share(u); }, where);
    gradients_.begin_step();
    if (options_.stage == 3) forget_gathered();
    auto const decided = detail::decide(totals, how);
    if (!decided.result.applied) return decided.result;
    optim::step_values const values{
        .step = how.step, .learning_rate = how.learning_rate, .gradient_scale = decided.gradient_scale};
    for (std::size_t u = 0; u < units(); ++u) {
      for (auto& each : stretches_[u])
        each.optimizer.step(ex, weights_of(u, each.where),
                            memory_span<G const, memory>(gradients_of(u, each.where)), values, where);
      if (ranks_.shared_block && ranks_.shared_block->unit == u)
        shared_.bring_weights(weights_of(u, parts_[u].share), where);
      if (options_.stage == 1 || options_.stage == 2) bring_weights(u, where);
    }
    under_way_.wait_for_all();
    return decided.result;
  }
  update_result update(Ex& ex, nn::loss_sum loss, update_options const& how, site where = site::here()) {
    return update(ex, std::span<nn::loss_sum const>(&loss, 1), how, where);
  }

private:
  struct nothing {};

  static zero_options checked(zero_ranks<Comm> const& ranks, zero_options options, site where) {
    options.validate(where);
    if (!options.reproducible) return options;
    auto const groups = ranks.gradients.size() * (ranks.replicas == nullptr ? 1 : ranks.replicas->size());
    auto const power_of_two = [](index_t n) { return (n & (n - 1)) == 0; };
    if (!std::same_as<G, float> || (groups > 1 && !power_of_two(options.micro_batches)) ||
        (ranks.replicas != nullptr && !power_of_two(ranks.gradients.size())))
      throw config_error("E-parallel-014", where, "zero: reproducible with ", options.micro_batches,
                         " micro-batches on each of ", groups, " gradient ranks, shards among ",
                         ranks.gradients.size(), " of them, gradients in ", sizeof(G),
                         " bytes: choose a number of micro-batches and a shard group that are powers of two, "
                         "and gradients in fp32");
    return options;
  }
  /// The unit whose block another stage writes to as well, where this rank owns it.
  std::size_t shared_here() const {
    if (!ranks_.shared_block || ranks_.shared_block->unit >= parts_.size()) return no_unit;
    return ranks_.shared_block->unit;
  }

  void require_unit(std::size_t u, site where) const {
    if (u >= units())
      throw config_error("E-parallel-003", where, "unit ", u, " of ", units(), " units does not exist");
  }
  void require_complete(std::span<nn::loss_sum const> losses, site where) const {
    index_t micro_batches = 0;
    for (std::size_t u = 0; u < units(); ++u) {
      if (!gradients_.is_ready(u))
        throw config_error("E-parallel-004", where, "update: the gradients of unit ", u,
                           " were not ready; call gradients_ready for all ", units(),
                           " units, with last = ", "true in the last micro-batch, or nothing_to_add");
      if (options_.stage == 3 && gathered_.users(u) > 0)
        throw config_error("E-parallel-015", where, "update: unit ", u, " is still lent; call done(", u, ")");
      micro_batches = (std::max)(micro_batches, gradients_.micro_batches(u));
    }
    if (!options_.reproducible || losses.empty()) return;
    if (micro_batches > options_.micro_batches || static_cast<index_t>(losses.size()) != micro_batches)
      throw config_error("E-parallel-016", where, "update: ", losses.size(), " losses of ", micro_batches,
                         " micro-batches, planned for ", options_.micro_batches,
                         "; the reproducible mode adds up the loss of each: give one for each micro-batch");
  }

  template <span_in<memory> Span>
  static Span part_of(Span all, layout::range part) {
    return all.subspan(static_cast<std::size_t>(part.begin), static_cast<std::size_t>(part.size()));
  }
  /// A range of unit `u`'s block, in what is kept of it.
  memory_span<T, memory> weights_of(std::size_t u, layout::range part) {
    auto const from = parts_[u].weights.begin;
    return part_of(weights(u), {part.begin - from, part.end - from});
  }
  memory_span<G, memory> gradients_of(std::size_t u, layout::range part) {
    auto const from = parts_[u].share.begin;
    return part_of(gradients_.share(u), {part.begin - from, part.end - from});
  }

  void gather(std::size_t u, std::size_t next, site where) {
    if (options_.prefetch == 0 || next >= units()) next = u;
    std::size_t const wanted[] = {u, parts_[u].given.tied, next, parts_[next].given.tied};
    gathered_.drop_unused([&](std::size_t other) {
      return std::find(std::begin(wanted), std::end(wanted), other) != std::end(wanted);
    });
    for (auto w : wanted)
      if (w != no_unit) gathered_.bring(w, memory_span<T const, memory>(weights(w)), where);
  }
  void keep_tied(std::size_t u, bool kept) {
    auto const tied = parts_[u].given.tied;
    if (options_.stage == 3 && tied != no_unit) gathered_.keep(tied, kept && parts_[tied].given.owned);
  }
  void forget_gathered() {
    for (std::size_t u = 0; u < units(); ++u) gathered_.keep(u, false);
    gathered_.drop_unused([](std::size_t) { return false; });
  }
  memory_span<T const, memory> borrowed(std::size_t u) {
    return options_.stage == 3 ? gathered_.use(u) : memory_span<T const, memory>(weights(u));
  }

  void add_up_replicas(site where) {
    comm::reduce_options const how{.order =
                                       options_.reproducible ? comm::summation::binary_tree : options_.order};
    for (auto u = units(); u-- > 0;) {
      if (!parts_[u].trained) continue;
      if (under_way_.full()) (void)under_way_.wait_for_oldest();
      under_way_.push(ranks_.replicas->start_all_reduce(gradients_.share(u), how, where), {});
    }
    under_way_.wait_for_all();
  }
  void bring_weights(std::size_t u, site where) {
    if (!parts_[u].trained) return;
    who_.counts_of(parts_[u].size, counts_);
    if (under_way_.full()) (void)under_way_.wait_for_oldest();
    under_way_.push(
        ranks_.gradients.start_all_gather_v(
            weights(u), memory_span<T const, memory>(weights_of(u, parts_[u].share)), counts_, where),
        {});
  }

  zero_ranks<Comm> ranks_;
  zero_options options_;
  layout::ownership who_;
  std::vector<detail::unit_part> parts_;
  tensor<T, 1, memory> weights_;
  std::vector<layout::range> places_; ///< Of each unit in weights_.
  std::vector<std::size_t> order_;    ///< The units that run.
  std::vector<std::vector<stretch>> stretches_;
  detail::gradient_sums<Comm, Ex, G> gradients_;
  detail::gathered_weights<Comm, Ex, T> gathered_;
  detail::step_sums<Comm, Ex, G> sums_;
  detail::shared_block<Comm, Ex, T, G> shared_;
  detail::request_queue<typename Comm::request, nothing> under_way_; ///< Of an update.
  std::vector<index_t> counts_;
};

} // namespace tessera::inline TESSERA_ABI::parallel

#endif
