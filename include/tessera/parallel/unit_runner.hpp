/// Runs a stage's part of a model for several micro-batches that are in flight at once: each has a slot with
/// activation memory of its own; scratch is shared, since only one of them runs at a time. Weights and
/// gradients come from a block_lender, unit by unit.
///
///     unit_runner<Ex, T, G> runner(units, {{0, 3}, {3, 6}}, {.width = 64, .largest = {4, 128}, .slots = 2});
///     runner.start(slot, {.part = 0, .micro_batch = i}, stream, pass);
///     runner.forward(ex, lender, slot, input);                      // of part 0: units 0, 1, 2
///     auto out = runner.output(slot);
///     runner.backward(ex, lender, slot, gradient, nn::backward_part::both);
///     runner.finish(slot);
///
/// The head's forward makes its gradient, so it runs when the backward of its micro-batch begins. Each
/// micro-batch then makes its gradients in one go, under every schedule, and nothing of the head is kept.
///
/// Memory: slots times what the units of the largest part keep, once the scratch of the unit that takes most.
#ifndef TESSERA_PARALLEL_UNIT_RUNNER_HPP
#define TESSERA_PARALLEL_UNIT_RUNNER_HPP

#include <algorithm>

#include <tessera/layout/shard.hpp>
#include <tessera/nn/rank_group.hpp>
#include <tessera/parallel/block_lender.hpp>

namespace tessera::inline TESSERA_ABI::parallel {

struct unit_runner_options {
  index_t width = 0;            ///< Of the residual stream.
  nn::batch_shape largest = {}; ///< Micro-batches to come are bounded by the memory that this one needs.
  int slots = 1;                ///< Micro-batches in flight.
  bool halves = false;          ///< Whether backwards come in halves, between which more is kept.
  bool ends_model = false;      ///< Whether the last unit is the model's head.
  memory_meter* meter = nullptr;
};

/// What a slot is for.
struct unit_runner_job {
  std::size_t part = 0;
  index_t micro_batch = 0; ///< In the step.
};

/// Bytes of activation memory.
struct unit_runner_plan {
  index_t slot = 0;    ///< Of one slot.
  index_t scratch = 0; ///< Shared by all.

  constexpr index_t bytes(int slots) const noexcept { return slots * slot + scratch; }
};

template <exec::space Ex, storage_scalar T, storage_scalar G, nn::rank_group<Ex> Group = nn::one_rank>
class unit_runner {
public:
  using memory = typename Ex::memory;
  using rows = nn::residual_rows<memory>;
  using units_type = nn::unit_list<Ex, T, G>;

  /// Borrows `units`, all of this rank, which it prepares for `slots` micro-batches; `parts` are ranges of
  /// them, in order. Throws config_error (E-parallel-080) where the parts are not a partition of the units.
  unit_runner(units_type& units, std::vector<layout::range> parts, unit_runner_options const& options,
              Group const& group = {}, site where = site::here())
      : units_(units), parts_(static_cast<std::vector<layout::range>&&>(parts)), options_(options),
        group_(group) {
    index_t end = 0;
    for (auto const& part : parts_) {
      if (part.begin != end || part.empty()) end = -1;
      if (end >= 0) end = part.end;
    }
    if (end != std::ssize(units_) || parts_.empty() || options.slots < 1)
      throw config_error("E-parallel-080", where, "unit_runner: ", parts_.size(), " parts and ",
                         options.slots, " slots for ", units_.size(),
                         " units; the parts are ranges of the units in order, none empty, and cover them; "
                         "with 1 slot or more");
    for (auto& u : units_) u->reserve(options.slots);
    auto const needed = plan(options.largest);
    scratch_ = buffer<memory>(needed.scratch, account(), where);
    slots_.resize(static_cast<std::size_t>(options.slots));
    for (auto& s : slots_) {
      s.activations = arena<memory>(needed.slot, scratch_, account(), where);
      s.starts.resize(units_.size());
    }
  }
  unit_runner(unit_runner const&) = delete;
  unit_runner& operator=(unit_runner const&) = delete;

  int slots() const noexcept { return options_.slots; }
  std::size_t parts() const noexcept { return parts_.size(); }
  layout::range part(std::size_t p) const { return parts_[p]; }

  /// What micro-batches of `shape` need.
  unit_runner_plan plan(nn::batch_shape shape) const {
    unit_runner_plan needed;
    for (auto const& part : parts_) {
      index_t kept = 0;
      for (auto u = part.begin; u < part.end; ++u) {
        auto const& one = *units_[static_cast<std::size_t>(u)];
        if (is_head(u)) {
          needed.scratch = (std::max)(needed.scratch, one.kept_bytes(shape) + one.scratch_bytes(shape));
        } else {
          kept += one.kept_bytes(shape) + (options_.halves ? one.kept_for_weights_bytes(shape) : 0);
          needed.scratch = (std::max)(needed.scratch, one.scratch_bytes(shape));
        }
      }
      needed.slot = (std::max)(needed.slot, kept);
    }
    // An evaluation sends a micro-batch through all parts in one slot: what flows, and one unit at work.
    for (auto const& u : units_) {
      auto const all =
          arena<memory>::template bytes_for<nn::residual_scalar>(rows_of(shape) * options_.width) +
          u->kept_bytes(shape) + u->scratch_bytes(shape);
      needed.scratch = (std::max)(needed.scratch, all - needed.slot);
    }
    return needed;
  }

  /// Rows of the residual stream that this rank holds of a micro-batch.
  index_t rows_of(nn::batch_shape shape) const {
    return group_.rows(shape.batch * group_.local_sequence(shape.sequence_length)).size();
  }
  index_t width() const noexcept { return options_.width; }

  /// Gives a slot to a micro-batch on its way through a part. Throws size_error (E-parallel-081) for one that
  /// is larger than planned.
  void start(int slot, unit_runner_job job, nn::stream<Ex, T> const& s, nn::pass const& p,
             site where = site::here()) {
    auto& mine = at(slot);
    if (auto const needed = plan(s.shape());
        needed.slot > mine.activations.own_bytes() || needed.scratch > scratch_.bytes())
      throw size_error("E-parallel-081", where, "a micro-batch of ", s.shape().batch, " samples of ",
                       s.shape().sequence_length, " tokens needs ", needed.slot, " bytes of activations and ",
                       needed.scratch, " of scratch, planned were ", mine.activations.own_bytes(), " and ",
                       scratch_.bytes(), "; plan with a larger batch_shape or feed smaller micro-batches");
    mine.activations.release({});
    mine.s = s;
    mine.p = p;
    mine.p.slot = slot;
    mine.job = job;
  }

  /// Runs the units of the slot's part, in training all but the head. `input` stays as it is until the
  /// backward has ended, and is ignored by an embedding. Without training the output may stand in it.
  /// `after`: the unit whose weights will be lent next.
  template <block_lender<Ex, T, G> Lender>
  void forward(Ex& ex, Lender& lender, int slot, rows input, std::size_t after = no_unit) {
    auto& mine = at(slot);
    mine.s.hidden = input;
    auto const all = parts_[mine.job.part];
    auto const end = mine.p.training && is_head(all.end - 1) ? all.end - 1 : all.end;
    for (auto u = all.begin; u < end; ++u) {
      auto const number = static_cast<std::size_t>(u);
      mine.starts[number] = mine.activations.mark();
      auto const lent = lender.lend(ex, number,
                                    {.next = u + 1 < end ? number + 1 : after,
                                     .gradients = false,
                                     .micro_batch = mine.job.micro_batch});
      units_[number]->forward(ex, lent, mine.s, mine.activations, mine.p);
      lender.done(number);
      if (mine.p.training) check_kept(mine, number);
    }
  }
  /// Sends a micro-batch that is only evaluated on through the next part, from where it is.
  void go_on(int slot, std::size_t part) { at(slot).job.part = part; }
  /// What the forward left.
  rows output(int slot) { return at(slot).s.hidden; }

  /// Turns `gradient`, that of the part's output, into that of its input, in place; with the head in the part
  /// it need not hold anything before. `both` and `weights` end the micro-batch's work on each unit. `last`:
  /// with the step's last micro-batch.
  template <block_lender<Ex, T, G> Lender>
  void backward(Ex& ex, Lender& lender, int slot, rows gradient, nn::backward_part what, bool last,
                std::size_t after = no_unit) {
    auto& mine = at(slot);
    auto const all = parts_[mine.job.part];
    auto end = all.end;
    mine.s.gradient = gradient;
    mine.p.accumulate = lender.accumulates(mine.job.micro_batch);
    if (is_head(end - 1)) {
      --end;
      if (what != nn::backward_part::weights)
        run_head(ex, lender, mine, last, all.begin < end ? static_cast<std::size_t>(end - 1) : after);
    }
    mine.p.part = what;
    bool const weights = what != nn::backward_part::weights;
    for (auto u = end; u-- > all.begin;) {
      auto const number = static_cast<std::size_t>(u);
      auto const lent = lender.lend(ex, number,
                                    {.next = weights && u > all.begin ? number - 1 : after,
                                     .weights = weights,
                                     .micro_batch = mine.job.micro_batch});
      units_[number]->backward(ex, lent, mine.s, mine.activations, mine.p);
      if (weights) lender.done(number);
      if (what == nn::backward_part::both) mine.activations.release(mine.starts[number]);
      if (what == nn::backward_part::input)
        check_kept(mine, number);
      else
        lender.gradients_ready(ex, number, last);
    }
  }

  /// Frees the slot's memory.
  void finish(int slot) { at(slot).activations.release({}); }

  /// The unit whose weights a training forward of a part is lent first, and the one of a backward (of `both`
  /// or of part `input`); no_unit where that runs none.
  std::size_t first_of_forward(std::size_t part) const {
    auto const first = parts_[part].begin;
    return is_head(first) ? no_unit : static_cast<std::size_t>(first);
  }
  std::size_t first_of_backward(std::size_t part) const {
    return static_cast<std::size_t>(parts_[part].end - 1);
  }

private:
  struct slot_state {
    arena<memory> activations;
    std::vector<typename arena<memory>::position> starts; ///< Where each unit's pieces begin.
    nn::stream<Ex, T> s;
    nn::pass p;
    unit_runner_job job;
  };

  memory_account account() const noexcept { return {options_.meter, memory_kind::activations}; }
  slot_state& at(int slot) { return slots_[static_cast<std::size_t>(slot)]; }
  bool is_head(index_t unit) const noexcept { return options_.ends_model && unit + 1 == std::ssize(units_); }

  template <block_lender<Ex, T, G> Lender>
  void run_head(Ex& ex, Lender& lender, slot_state& mine, bool last, std::size_t after) {
    arena_scope const scope(mine.activations);
    auto const number = units_.size() - 1;
    auto const lent = lender.lend(ex, number, {.next = after, .micro_batch = mine.job.micro_batch});
    mine.p.part = nn::backward_part::both;
    units_[number]->forward(ex, lent, mine.s, mine.activations, mine.p);
    units_[number]->backward(ex, lent, mine.s, mine.activations, mine.p);
    lender.done(number);
    lender.gradients_ready(ex, number, last);
  }

  /// What is kept stands in the slot's own memory: in the shared part the next one to run would overwrite it.
  void check_kept(slot_state const& mine, std::size_t unit) const {
    if (mine.activations.used() > mine.activations.own_bytes())
      throw size_error("E-parallel-082", site::here(), "unit ", units_[unit]->name(), " keeps ",
                       mine.activations.used(), " bytes together with the units before it, more than the ",
                       mine.activations.own_bytes(), " that their kept_bytes say");
  }

  units_type& units_;
  std::vector<layout::range> parts_;
  unit_runner_options options_;
  Group group_;
  buffer<memory> scratch_;
  std::vector<slot_state> slots_;
};

} // namespace tessera::inline TESSERA_ABI::parallel

#endif
