/// Runs a pipeline schedule: each rank of `stages` is a stage, holds some units, and does the actions of its
/// list (layout/schedule.hpp) for the micro-batches of a step.
///
///     auto plan = layout::make_schedule(kind, {.stages = stages.size(), .micro_batches = 8});
///     parallel::pipeline<comm::mpi, Ex, bf16, float> pipe(stages, units, {{0, 3}}, plan,
///                                                         {.width = 64, .largest = {4, 128}});
///     auto input = [&](index_t i) { return pipeline_micro_batch<Ex>{tokens(i), targets(i)}; };
///     pipe.run(ex, lender, input, pass);
///     auto loss = pipe.loss(ex);                       // not zero on the last stage alone
///
/// Activations and gradients travel on a communicator each, in the order of the list; a receive is started as
/// soon as the messages before it have been, while the stage still computes. Whatever is lent to a message is
/// left alone until that has ended: an activation is sent from where the forward left it and stays there for
/// the backward anyhow; gradients go round a few buffers.
///
/// A micro-batch may be empty; its messages then are, too. Cost of a step: for each micro-batch and each
/// border between parts a message of rows * width floats there and one back.
#ifndef TESSERA_PARALLEL_PIPELINE_HPP
#define TESSERA_PARALLEL_PIPELINE_HPP

#include <array>
#include <chrono>
#include <exception>

#include <tessera/exec/copy.hpp>
#include <tessera/layout/schedule_simulator.hpp>
#include <tessera/parallel/detail/pipeline_messages.hpp>
#include <tessera/parallel/unit_runner.hpp>

namespace tessera::inline TESSERA_ABI::parallel {

/// What every stage is told of a micro-batch. Only the first one reads the tokens, only the last one the
/// targets; the others need their extents.
template <exec::space Ex>
struct pipeline_micro_batch {
  view<std::int32_t const, 2, typename Ex::memory> tokens = {};  ///< [batch, tokens of a sample on this rank]
  view<std::int32_t const, 2, typename Ex::memory> targets = {}; ///< The same.
  index_t whole_length = 0;                                      ///< nn::stream::whole_length
  index_t first_sample = 0;                                      ///< nn::pass::first_sample
};

struct pipeline_options {
  index_t width = 0;            ///< Of the residual stream.
  nn::batch_shape largest = {}; ///< Micro-batch to plan memory for.
  bool trace = false; ///< Record when each action begins and ends; waits for the space after each of them.
  memory_meter* meter = nullptr;
};

template <comm::communicator Comm, exec::space Ex, storage_scalar T, storage_scalar G,
          nn::rank_group<Ex> Group = nn::one_rank>
  requires communicates_for<Comm, Ex>
class pipeline {
public:
  using memory = typename Ex::memory;
  using rows = nn::residual_rows<memory>;
  using micro_batch_type = pipeline_micro_batch<Ex>;

  /// Called by all ranks of `stages`, whose rank is the stage, with the same plan. `units` are this stage's,
  /// borrowed; `chunks` says which of them are each chunk's. Throws config_error where the plan is not one
  /// (layout::simulate), or not for these stages and chunks (E-parallel-083).
  pipeline(Comm& stages, nn::unit_list<Ex, T, G>& units, std::vector<layout::range> chunks,
           layout::schedule plan, pipeline_options const& options, Group const& group = {},
           site where = site::here())
      : plan_(checked(stages, chunks.size(), static_cast<layout::schedule&&>(plan), where)),
        stage_(stages.rank()), options_(options), needs_(detail::pipeline_needs::of(plan_, stage_)),
        runner_(units, static_cast<std::vector<layout::range>&&>(chunks),
                {.width = options.width,
                 .largest = options.largest,
                 .slots = needs_.slots,
                 .halves = needs_.halves,
                 .ends_model = stage_ + 1 == stages.size(),
                 .meter = options.meter},
                group, where),
        activations_(stages, needs_.inputs, room(), {options.meter, memory_kind::activations}, where),
        gradients_(stages, needs_.gradients, room(), {options.meter, memory_kind::activations}, where),
        totals_({plan_.shape.micro_batches, 2}, {options.meter, memory_kind::other}, where),
        losses_(static_cast<std::size_t>(plan_.shape.micro_batches)),
        slots_(static_cast<std::size_t>(needs_.slots)),
        batches_(static_cast<std::size_t>(plan_.shape.micro_batches)) {
    if (options.trace) trace_.reserve(list().size());
  }
  pipeline(pipeline const&) = delete;
  pipeline& operator=(pipeline const&) = delete;

  layout::schedule const& plan() const noexcept { return plan_; }
  int stage() const noexcept { return stage_; }
  unit_runner<Ex, T, G, Group> const& runner() const noexcept { return runner_; }
  /// Those that its messages travel on, for their meters.
  std::array<Comm*, 2> communicators() noexcept {
    return {&activations_.communicator(), &gradients_.communicator()};
  }

  /// Forward and backward of all micro-batches of a step. `micro_batch(i)` is asked once a step for each, in
  /// ascending order; its views stay valid until run returns. `common` holds seed, step and gradient scale.
  template <block_lender<Ex, T, G> Lender, std::invocable<index_t> Supplier>
  void run(Ex& ex, Lender& lender, Supplier&& micro_batch, nn::pass common = {}) {
    common.training = true;
    unwinding_guard const guard(*this);
    begin(ex);
    trace_.clear();
    for (std::size_t i = 0; i < list().size(); ++i) {
      auto const started = now();
      act(ex, lender, micro_batch, common, i);
      if (!options_.trace) continue;
      ex.synchronize();
      trace_.push_back({list()[i], started, now()});
    }
    activations_.finish();
    gradients_.finish();
  }

  /// The summed loss of any number of micro-batches, without dropout, smoothing or z-loss; zero on all but
  /// the last stage. Throws what `loss` throws.
  template <block_lender<Ex, T, G> Lender, std::invocable<index_t> Supplier>
  nn::loss_sum evaluate(Ex& ex, Lender& lender, index_t micro_batches, Supplier&& micro_batch) {
    unwinding_guard const guard(*this);
    begin(ex);
    for (index_t i = 0; i < micro_batches; ++i) evaluate_one(ex, lender, micro_batch(i), i);
    for (int s = 0; s < needs_.slots; ++s) release(s);
    return loss(ex);
  }

  /// Of each micro-batch of the last run, in order; zeros on all but the last stage. Waits for the space, and
  /// throws what it found out only now, such as a token outside the vocabulary.
  std::span<nn::loss_sum const> losses(Ex& ex) {
    static_assert(sizeof(nn::loss_sum) == 2 * sizeof(double));
    copy(ex, std::span<double>(&losses_.data()->sum, 2 * losses_.size()), totals_.span());
    return losses_; // copy: of exec/copy.hpp, or of the space's own header
  }
  /// Their sum.
  nn::loss_sum loss(Ex& ex) {
    nn::loss_sum all;
    for (auto one : losses(ex)) all += one;
    return all;
  }

  /// When each action of the last run happened, on all stages: in seconds, of each machine's own clock.
  /// Called by all stages. Throws config_error (E-parallel-085) without pipeline_options::trace, or before a
  /// run.
  layout::schedule_timeline timeline(site where = site::here()) {
    if (trace_.size() != list().size())
      throw config_error("E-parallel-085", where, "pipeline: no run was traced; set pipeline_options::trace");
    std::vector<index_t> counts;
    index_t all = 0;
    for (auto const& actions : plan_.actions) {
      counts.push_back(2 * std::ssize(actions));
      all += counts.back();
    }
    std::vector<double> mine, times(static_cast<std::size_t>(all));
    for (auto const& a : trace_) mine.insert(mine.end(), {a.begin, a.end});
    activations_.communicator().all_gather_v(std::span<double>(times), std::span<double const>(mine),
                                             std::span<index_t const>(counts), where);
    layout::schedule_timeline run;
    auto at = times.begin();
    for (auto const& actions : plan_.actions) {
      run.stages.emplace_back();
      for (auto a : actions) {
        run.stages.back().push_back({a, at[0], at[1]});
        at += 2;
      }
    }
    return run;
  }

  /// Activation memory of this stage: slots, scratch, and the buffers of messages.
  index_t planned_bytes() const {
    return runner_.plan(options_.largest).bytes(needs_.slots) +
           (needs_.inputs + needs_.gradients) * room() * static_cast<index_t>(sizeof(nn::residual_scalar));
  }

private:
  struct slot_state {
    bool busy = false;
    int micro_batch = 0, chunk = 0;
    int input = -1;                ///< The buffer that its input was received into.
    typename Comm::request output; ///< While what its forward left is being sent.
  };

  /// Messages that can't end any more are given up, not waited for.
  struct unwinding_guard {
    explicit unwinding_guard(pipeline& p) noexcept : owner(p), before(std::uncaught_exceptions()) {}
    ~unwinding_guard() {
      if (std::uncaught_exceptions() > before) owner.drop();
    }
    unwinding_guard(unwinding_guard const&) = delete;
    unwinding_guard& operator=(unwinding_guard const&) = delete;
    pipeline& owner;
    int before;
  };

  static layout::schedule checked(Comm& stages, std::size_t chunks, layout::schedule&& plan, site where) {
    if (plan.shape.stages != stages.size() || static_cast<std::size_t>(plan.shape.chunks) != chunks)
      throw config_error("E-parallel-083", where, "pipeline: the plan is for ", plan.shape.stages,
                         " stages of ", plan.shape.chunks, " chunks; there are ", stages.size(),
                         " ranks, and the units of ", chunks, " chunks");
    (void)layout::simulate(plan, layout::schedule_durations{}, {.in_flight = 1}, where);
    return static_cast<layout::schedule&&>(plan);
  }

  std::vector<layout::action> const& list() const noexcept {
    return plan_.actions[static_cast<std::size_t>(stage_)];
  }
  index_t room() const { return runner_.rows_of(options_.largest) * options_.width; }
  static double now() noexcept {
    return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
  }

  void begin(Ex& ex) {
    using enum layout::action_kind;
    using exec::zero; // and not the class parallel::zero; for a device, that of the space's own header
    zero(ex, totals_.span());
    known_ = 0;
    activations_.begin(list(), send_activation, receive_activation);
    gradients_.begin(list(), send_gradient, receive_gradient);
  }
  void drop() noexcept {
    activations_.drop();
    gradients_.drop();
    for (auto& slot : slots_) slot.output = {}, slot.busy = false;
  }

  template <std::invocable<index_t> Supplier>
  micro_batch_type const& batch(Supplier& supplier, int micro_batch) {
    for (; known_ <= micro_batch; ++known_)
      batches_[static_cast<std::size_t>(known_)] = supplier(index_t{known_});
    return batches_[static_cast<std::size_t>(micro_batch)];
  }
  /// Losses are added to those of micro-batch `number`.
  nn::stream<Ex, T> stream_of(micro_batch_type const& b, index_t number) {
    return {.tokens = b.tokens,
            .targets = b.targets,
            .whole_length = b.whole_length,
            .totals = {totals_.data() + 2 * number, {2}}};
  }
  index_t rows_of(micro_batch_type const& b) { return runner_.rows_of(stream_of(b, 0).shape()); }
  rows rows_in(nn::residual_scalar* data, micro_batch_type const& b) {
    return {data, {rows_of(b), options_.width}};
  }
  index_t elements_of(micro_batch_type const& b) { return rows_of(b) * options_.width; }

  /// The unit whose weights are lent first after action `i` of the list.
  std::size_t unit_after(std::size_t i) const {
    using enum layout::action_kind;
    for (++i; i < list().size(); ++i) {
      auto const a = list()[i];
      auto const chunk = static_cast<std::size_t>(a.chunk);
      auto const unit = a.kind == forward                                ? runner_.first_of_forward(chunk)
                        : a.kind == backward || a.kind == backward_input ? runner_.first_of_backward(chunk)
                                                                         : no_unit;
      if (unit != no_unit) return unit;
    }
    return no_unit;
  }

  template <block_lender<Ex, T, G> Lender, std::invocable<index_t> Supplier>
  void act(Ex& ex, Lender& lender, Supplier& supplier, nn::pass const& common, std::size_t i) {
    auto const a = list()[i];
    auto const from = [&](layout::action m) { return plan_.peer_of(stage_, m).stage; };
    auto const elements = [&](layout::action m) { return elements_of(batch(supplier, m.micro_batch)); };
    auto const receive_ahead = [&] {
      activations_.receive_ahead(from, elements);
      gradients_.receive_ahead(from, elements);
    };
    receive_ahead();
    switch (a.kind) {
    case layout::action_kind::receive_activation:
      activations_.receive(a, i, from(a), elements(a));
      return receive_ahead();
    case layout::action_kind::receive_gradient:
      gradients_.receive(a, i, from(a), elements(a));
      return receive_ahead();
    case layout::action_kind::send_activation: {
      auto const slot = slot_of(a);
      return activations_.send(slots_[static_cast<std::size_t>(slot)].output, runner_.output(slot).span(), i,
                               from, elements);
    }
    case layout::action_kind::send_gradient:
      return gradients_.send_buffer(gradients_.take_kept(a), i, from, elements);
    case layout::action_kind::forward:
      return forward(ex, lender, batch(supplier, a.micro_batch), common, i);
    case layout::action_kind::backward:
      return backward(ex, lender, batch(supplier, a.micro_batch), i, nn::backward_part::both);
    case layout::action_kind::backward_input:
      return backward(ex, lender, batch(supplier, a.micro_batch), i, nn::backward_part::input);
    case layout::action_kind::backward_weights:
      runner_.backward(ex, lender, slot_of(a), {}, nn::backward_part::weights, is_last(a), unit_after(i));
      return release(slot_of(a));
    }
  }

  template <block_lender<Ex, T, G> Lender>
  void forward(Ex& ex, Lender& lender, micro_batch_type const& b, nn::pass p, std::size_t i) {
    auto const a = list()[i];
    int number = 0;
    while (slots_[static_cast<std::size_t>(number)].busy) ++number;
    auto& slot = slots_[static_cast<std::size_t>(number)];
    slot.busy = true;
    slot.micro_batch = a.micro_batch;
    slot.chunk = a.chunk;
    slot.input = plan_.has_before(stage_, a.chunk) ? activations_.take_kept(a) : -1;
    p.first_sample = b.first_sample;
    runner_.start(number, {static_cast<std::size_t>(a.chunk), a.micro_batch}, stream_of(b, a.micro_batch), p);
    auto const input = slot.input >= 0 ? rows_in(activations_.data_of(slot.input), b)
                       : a.chunk > 0   ? runner_.output(slot_of({a.kind, a.micro_batch, a.chunk - 1}))
                                       : rows{};
    runner_.forward(ex, lender, number, input, unit_after(i));
  }

  template <block_lender<Ex, T, G> Lender>
  void backward(Ex& ex, Lender& lender, micro_batch_type const& b, std::size_t i, nn::backward_part part) {
    auto const a = list()[i];
    slots_[static_cast<std::size_t>(slot_of(a))].output.wait(); // its gradient is here: it has long arrived
    bool const ends_model = plan_.part_of(stage_, a.chunk) + 1 == plan_.parts();
    auto const buffer = ends_model ? gradients_.take_buffer() : gradients_.take_kept(a);
    runner_.backward(ex, lender, slot_of(a), rows_in(gradients_.data_of(buffer), b), part, is_last(a),
                     unit_after(i));
    if (plan_.has_before(stage_, a.chunk))
      gradients_.keep(a, buffer); // until it is sent
    else if (a.chunk > 0)
      gradients_.keep({a.kind, a.micro_batch, a.chunk - 1}, buffer); // for the part before, on this stage
    else
      gradients_.give_back(buffer);
    if (part == nn::backward_part::both) release(slot_of(a));
  }

  template <block_lender<Ex, T, G> Lender>
  void evaluate_one(Ex& ex, Lender& lender, micro_batch_type const& b, index_t i) {
    nn::pass const p{.first_sample = b.first_sample, .training = false};
    for (int chunk = 0; chunk < plan_.shape.chunks; ++chunk) {
      auto const part = static_cast<std::size_t>(chunk);
      if (plan_.shape.stages == 1 && chunk > 0) { // it is here already
        runner_.go_on(0, part);
        runner_.forward(ex, lender, 0, runner_.output(0));
        continue;
      }
      int const number = plan_.shape.stages == 1 ? 0 : narrow<int>((i + chunk) % needs_.slots);
      release(number);
      auto& slot = slots_[static_cast<std::size_t>(number)];
      rows input;
      if (plan_.has_before(stage_, chunk)) {
        layout::action const a{layout::action_kind::receive_activation, 0, chunk};
        slot.input = activations_.receive_now(plan_.peer_of(stage_, a).stage, elements_of(b));
        input = rows_in(activations_.data_of(slot.input), b);
      }
      slot.busy = true;
      runner_.start(number, {part, i}, stream_of(b, 0), p);
      runner_.forward(ex, lender, number, input);
      if (!plan_.has_after(stage_, chunk)) continue;
      layout::action const a{layout::action_kind::send_activation, 0, chunk};
      slot.output = activations_.send_now(runner_.output(number).span(), plan_.peer_of(stage_, a).stage);
    }
  }

  int slot_of(layout::action a) const {
    for (std::size_t s = 0; s < slots_.size(); ++s)
      if (slots_[s].busy && slots_[s].micro_batch == a.micro_batch && slots_[s].chunk == a.chunk)
        return narrow<int>(s);
    throw config_error("E-parallel-084", site::here(), "pipeline: no slot holds what the ", text_of(a),
                       " needs");
  }
  bool is_last(layout::action a) const noexcept { return a.micro_batch + 1 == plan_.shape.micro_batches; }

  void release(int number) {
    auto& slot = slots_[static_cast<std::size_t>(number)];
    if (!slot.busy) return;
    slot.output.wait();
    runner_.finish(number);
    activations_.give_back(slot.input);
    slot.input = -1;
    slot.busy = false;
  }

  layout::schedule plan_;
  int stage_;
  pipeline_options options_;
  detail::pipeline_needs needs_;
  unit_runner<Ex, T, G, Group> runner_;
  detail::message_lane<Comm, Ex, nn::residual_scalar> activations_, gradients_;
  tensor<double, 2, memory> totals_; ///< {sum, count} of the loss of each micro-batch.
  std::vector<nn::loss_sum> losses_;
  std::vector<slot_state> slots_;
  std::vector<micro_batch_type> batches_; ///< Of the step that runs.
  int known_ = 0;                         ///< How many of them the supplier has told.
  std::vector<layout::timed_action> trace_;
};

} // namespace tessera::inline TESSERA_ABI::parallel

#endif
