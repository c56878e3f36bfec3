/// Data parallel training over buffers that the caller keeps (parallel/zero.hpp owns them, and has more
/// stages): every rank works on its own samples, gradients are summed over the ranks while
/// backward is still running, and every rank ends the step with the same weights, bit by bit.
///
///     parallel::data_parallel<comm::mpi, exec::host, bf16, float> replicas(
///         comm, ex, parallel::flat_model_of(model.store()), optim::adamw_options{}, {.zero = 1});
///     for (index_t i = 0; i < micro_batches; ++i)
///       loss += model.forward_backward(ex, tokens(i), targets(i), {.accumulate = i > 0}, [&](auto unit) {
///         if (i + 1 == micro_batches) replicas.gradients_ready(unit);
///       });
///     auto done = replicas.update(ex, loss, {.step = step + 1, .learning_rate = rate, .clip_norm = 1});
///
/// ZeRO stage 0 keeps the whole optimizer state on each rank and sums gradients by all_reduce, one message a
/// bucket. Stage 1 keeps on each rank the state of the part of every unit that it owns (layout::ownership),
/// brings each part's gradients to its owner by reduce_scatter_v, and the new weights to all ranks by
/// all_gather_v, one message a unit. Parts may be uneven or empty.
///
/// Cost of a step, for n elements: stage 0 sends and receives what an all_reduce of n gradients does; stage 1
/// what a reduce_scatter of n gradients and an all_gather of n weights do. Both: one message of 24 bytes.
/// Every rank issues the same collectives whatever its samples; one that has none calls `nothing_to_add`.
#ifndef TESSERA_PARALLEL_DATA_PARALLEL_HPP
#define TESSERA_PARALLEL_DATA_PARALLEL_HPP

#include <algorithm>

#include <tessera/ops/scale.hpp>
#include <tessera/optim/adamw.hpp>
#include <tessera/parallel/buckets.hpp>
#include <tessera/parallel/detail/request_queue.hpp>
#include <tessera/parallel/detail/step_sums.hpp>
#include <tessera/parallel/flat_model.hpp>
#include <tessera/parallel/global_norm.hpp>
#include <tessera/parallel/loss.hpp>
#include <tessera/parallel/memory_plan.hpp>
#include <tessera/parallel/zero_options.hpp>

namespace tessera::inline TESSERA_ABI::parallel {

struct data_parallel_options {
  int zero = 1;                            ///< Stage 0 or 1.
  index_t bucket_bytes = index_t{4} << 20; ///< Units wait for each other until they are this large together;
                                           ///< stage 0 then sends one message, stage 1 one a unit.
  int in_flight = 2;                       ///< Messages under way at once; each has memory of its own, which
                                           ///< grows to the largest message that it has carried.
  comm::summation order = comm::summation::rank_order;
  memory_meter* meter = nullptr; ///< Counts the optimizer state.
};

template <comm::communicator Comm, exec::space Ex, storage_scalar T, storage_scalar G,
          class Optimizer = optim::adamw<Ex, T>>
  requires communicates_for<Comm, Ex> && optim::optimizer<Optimizer, Ex, T, G>
class data_parallel {
public:
  using memory = typename Ex::memory;
  using optimizer_options = typename Optimizer::options_type;

  /// Weights must be the same on all ranks. Throws size_error (E-parallel-001) for a model that does not fit
  /// together, config_error (E-parallel-002) for a stage or bounds that do not exist.
  data_parallel(Comm& comm, Ex& ex, flat_model<T, G, memory> model, optimizer_options const& settings,
                data_parallel_options options = {}, site where = site::here())
      : comm_(comm), model_(static_cast<flat_model<T, G, memory>&&>(model)),
        options_(options), who_{comm.rank(), comm.size()}, under_way_((std::max)(1, options.in_flight)) {
    model_.validate(where);
    if (options.zero < 0 || options.zero > 1 || options.bucket_bytes < 1 || options.in_flight < 1)
      throw config_error("E-parallel-002", where, "data_parallel: zero is ", options.zero,
                         " (0 or 1), bucket_bytes ", options.bucket_bytes, " and in_flight ",
                         options.in_flight, " (1 or more)");
    buckets_ = buckets_of(model_.units, least_elements(options));
    optimizers_.reserve(model_.units.size());
    for (std::size_t u = 0; u < model_.units.size(); ++u)
      optimizers_.emplace_back(ex, owned(u).size(), settings,
                               optim::ranges_within(model_.decayed[u], owned(u)),
                               memory_account{options.meter, memory_kind::optimizer_state});
    ready_.resize(model_.units.size());
    counts_.resize(static_cast<std::size_t>(comm.size()));
    start_from_weights(ex);
  }
  data_parallel(data_parallel const&) = delete;
  data_parallel& operator=(data_parallel const&) = delete;

  /// What a rank will keep and, for communication, keep at most.
  static memory_plan plan(std::span<layout::range const> units, layout::ownership who,
                          optimizer_options const& settings, data_parallel_options const& options = {}) {
    auto plan = plan_memory(units, {.rank = who.rank,
                                    .ranks = who.ranks,
                                    .zero = options.zero,
                                    .weight_bytes = sizeof(T),
                                    .gradient_bytes = sizeof(G),
                                    .state_bytes = Optimizer::state_bytes(settings)});
    if constexpr (requires { Comm::template scratch_bytes<G>(index_t{}, int{}); }) {
      auto largest = Comm::template scratch_bytes<double>(3, who.ranks);
      auto const carry = [&](index_t n) {
        largest = (std::max)(largest, Comm::template scratch_bytes<G>(n, who.ranks));
      };
      if (options.zero == 0)
        for (auto const& b : buckets_of(units, least_elements(options))) carry(b.elements.size());
      else // parts are whole granules, so rank 0's may be more than an even share
        for (auto const& unit : units) carry(who.of(unit.size(), 0).size() * who.ranks);
      plan.communication = largest * options.in_flight;
    }
    return plan;
  }

  std::size_t units() const noexcept { return model_.units.size(); }
  data_parallel_options const& options() const noexcept { return options_; }

  /// The part of unit `u`'s block whose optimizer state this rank keeps, counted from the block's beginning,
  /// and that state: what a checkpoint saves, restores, or cuts anew for other ranks.
  layout::range owned(std::size_t u) const { return kept_state(model_.units[u].size(), who_, options_.zero); }
  Optimizer& optimizer(std::size_t u) { return optimizers_[u]; }

  /// Lets the fp32 masters start anew from the weights as they are: after these were set from outside.
  void start_from_weights(Ex& ex) {
    for (std::size_t u = 0; u < units(); ++u)
      optimizers_[u].start_from(ex, memory_span<T const, memory>(model_.weights_of(owned_elements(u))));
  }

  /// Lets the fp32 masters start from values known in fp32: `fill(unit, range of its block, out)` writes
  /// them.
  template <std::invocable<std::size_t, layout::range, memory_span<float, typename Ex::memory>> Fill>
  void start_from(Ex& ex, Fill&& fill) {
    index_t largest = 0;
    for (std::size_t u = 0; u < units(); ++u) largest = (std::max)(largest, owned(u).size());
    tensor<float, 1, memory> values({largest}, {options_.meter, memory_kind::other});
    for (std::size_t u = 0; u < units(); ++u) {
      auto const part = values.span().first(static_cast<std::size_t>(owned(u).size()));
      fill(u, owned(u), part);
      optimizers_[u].start_from(ex, memory_span<float const, memory>(part));
    }
  }

  /// Unit `u`'s gradients hold the sum over all of this rank's micro-batches. Starts what can be reduced and
  /// drives what is under way. Throws config_error (E-parallel-003) for a unit that is not awaited.
  void gradients_ready(std::size_t u, site where = site::here()) {
    if (u >= units() || ready_[u])
      throw config_error("E-parallel-003", where, "gradients_ready(", u, ") of ", units(),
                         " units: each is to be called once a step, in the last micro-batch alone");
    ready_[u] = true;
    while (next_bucket_ < buckets_.size() && all_ready(buckets_[next_bucket_])) {
      reduce(buckets_[next_bucket_]);
      ++next_bucket_;
    }
    under_way_.drive();
  }

  /// Called instead by a rank without a micro-batch in this step: its gradients are zeros.
  void nothing_to_add(Ex& ex, site where = site::here()) {
    auto const all = static_cast<index_t>(model_.gradients.size());
    ops::fill(ex, view<G, 1, memory>(model_.gradients.data(), {all}), 0);
    for (auto u = units(); u-- > 0;) gradients_ready(u, where);
  }

  /// Ends the step: waits for the gradients, decides with all ranks whether they are finite, clips, updates,
  /// and brings the weights to all ranks. `loss` is what this rank's micro-batches gave. The gradients are
  /// divided here, once, by the count of all ranks. Throws config_error (E-parallel-004) where some unit's
  /// gradients were never ready.
  update_result update(Ex& ex, nn::loss_sum loss, update_options const& how, site where = site::here()) {
    if (next_bucket_ < buckets_.size())
      throw config_error("E-parallel-004", where, "update: the gradients of unit ",
                         buckets_[next_bucket_].end_unit - 1, " or one before it were not ready; call ",
                         "gradients_ready for all ", units(), " units, or nothing_to_add");
    under_way_.wait_for_all();
    next_bucket_ = 0;
    std::fill(ready_.begin(), ready_.end(), false);

    double sums[] = {loss.sum, loss.count,
                     counted_squares(ex, memory_span<G const, memory>(model_.gradients), model_.units, who_)};
    comm_.all_reduce(std::span<double>(sums), comm::reduce_options{});
    auto const decided = detail::decide({{sums[0], sums[1]}, sums[2]}, how);
    if (!decided.result.applied) return decided.result;
    optim::step_values const values{
        .step = how.step, .learning_rate = how.learning_rate, .gradient_scale = decided.gradient_scale};
    for (std::size_t u = 0; u < units(); ++u) {
      auto const part = owned_elements(u);
      optimizers_[u].step(ex, model_.weights_of(part),
                          memory_span<G const, memory>(model_.gradients_of(part)), values);
      if (options_.zero == 1) gather(u);
    }
    under_way_.wait_for_all();
    return decided.result;
  }

private:
  struct nothing {};

  static index_t least_elements(data_parallel_options const& options) {
    return (std::max)(index_t{1}, options.bucket_bytes / static_cast<index_t>(sizeof(G)));
  }

  layout::range owned_elements(std::size_t u) const {
    auto const at = model_.units[u].begin;
    auto const part = owned(u);
    return {at + part.begin, at + part.end};
  }

  bool all_ready(bucket const& b) const {
    for (auto u = b.first_unit; u < b.end_unit; ++u)
      if (!ready_[u]) return false;
    return true;
  }

  void reduce(bucket const& b) {
    comm::reduce_options const how{.order = options_.order};
    if (options_.zero == 0) {
      make_room();
      under_way_.push(comm_.start_all_reduce(model_.gradients_of(b.elements), how), {});
      return;
    }
    for (auto u = b.end_unit; u-- > b.first_unit;) {
      make_room();
      under_way_.push(
          comm_.start_reduce_scatter_v(model_.gradients_of(owned_elements(u)),
                                       memory_span<G const, memory>(model_.gradients_of(model_.units[u])),
                                       counts_of(u), how),
          {});
    }
  }

  void gather(std::size_t u) {
    make_room();
    under_way_.push(comm_.start_all_gather_v(
                        model_.weights_of(model_.units[u]),
                        memory_span<T const, memory>(model_.weights_of(owned_elements(u))), counts_of(u)),
                    {});
  }

  std::span<index_t const> counts_of(std::size_t u) {
    who_.counts_of(model_.units[u].size(), counts_);
    return counts_;
  }

  void make_room() {
    if (under_way_.full()) (void)under_way_.wait_for_oldest();
  }

  Comm& comm_;
  flat_model<T, G, memory> model_;
  data_parallel_options options_;
  layout::ownership who_;
  std::vector<bucket> buckets_;
  std::vector<Optimizer> optimizers_;
  std::vector<bool> ready_;
  std::size_t next_bucket_ = 0; ///< The next one to be reduced in this step.
  detail::request_queue<typename Comm::request, nothing> under_way_;
  std::vector<index_t> counts_;
};

} // namespace tessera::inline TESSERA_ABI::parallel

#endif
