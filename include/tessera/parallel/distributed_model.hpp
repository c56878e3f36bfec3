/// A whole model laid over ranks as a training_layout says: this rank's part of its units, their state
/// (parallel/zero.hpp), and the pipeline that runs them (parallel/pipeline.hpp).
///
///     parallel::distributed_model<comm::mpi, Ex, bf16, float> model(world, ex, config, layout,
///                                                                   {.batch = 32, .optimizer = {...}});
///     model.initialise(ex, seed);
///     auto result = model.step(ex, batch_of, {.step = 1, .learning_rate = 1e-3}, {.seed = seed});
///     auto loss = model.evaluate(ex, 100, batch_of);                     // the same on every rank
///
/// `batch_of(samples)` gives the tokens and targets of a range of samples: of a step, positions within its
/// batch; of an evaluation, within its samples. Every rank asks for its own, in ascending order, and holds of
/// each sample the positions that group().positions(sequence_length) names; of an empty range it needs views
/// of 0 samples. All calls are made by all ranks.
#ifndef TESSERA_PARALLEL_DISTRIBUTED_MODEL_HPP
#define TESSERA_PARALLEL_DISTRIBUTED_MODEL_HPP

#include <tessera/nn/initialise.hpp>
#include <tessera/nn/make_transformer.hpp>
#include <tessera/parallel/loss.hpp>
#include <tessera/parallel/model_group.hpp>
#include <tessera/parallel/pipeline.hpp>
#include <tessera/parallel/training_layout.hpp>
#include <tessera/parallel/zero.hpp>

namespace tessera::inline TESSERA_ABI::parallel {

/// Units [begin, end) of part `part` of `parts` of a model: its layers are shared evenly, the first parts
/// taking more; the embedding goes with the first part, the head with the last.
constexpr layout::range units_of_part(nn::transformer_config const& config, index_t parts, index_t part) {
  auto const layers = layout::shard_of(config.layers, parts, part);
  return {layers.begin + (part > 0 ? 1 : 0), layers.end + (part + 1 < parts ? 1 : 2)};
}

template <std::copyable OptimizerOptions>
struct distributed_model_options {
  index_t batch = 1;           ///< Samples of a step, over all ranks.
  index_t sequence_length = 0; ///< Of a sample; 0: the config's.
  OptimizerOptions optimizer{};
  zero_options zero{}; ///< Its stage, reproducible, micro_batches and open_units come from the layout.
  bool trace = false;  ///< pipeline_options::trace
  memory_meter* meter = nullptr;
};

/// The samples of one micro-batch, or this rank's positions of them.
template <exec::space Ex>
struct local_samples {
  view<std::int32_t const, 2, typename Ex::memory> tokens = {};  ///< [samples, positions on this rank]
  view<std::int32_t const, 2, typename Ex::memory> targets = {}; ///< The same.
};

/// batch_of(samples), see above.
template <class F, class Ex>
concept sample_supplier = exec::space<Ex> && requires(F& batch_of, layout::range samples) {
  { batch_of(samples) } -> std::convertible_to<local_samples<Ex>>;
};

template <comm::communicator Comm, exec::space Ex, storage_scalar T, storage_scalar G,
          class Optimizer = optim::adamw<Ex, T>>
  requires communicates_for<Comm, Ex> && optim::optimizer<Optimizer, Ex, T, G>
class distributed_model {
public:
  using memory = typename Ex::memory;
  using group_type = model_group<Comm>;
  using zero_type = zero<Comm, Ex, T, G, Optimizer>;
  using pipeline_type = pipeline<Comm, Ex, T, G, group_type>;
  using options_type = distributed_model_options<typename Optimizer::options_type>;

  /// Weights begin as zeros. Throws config_error where config, layout, batch and number of ranks do not fit;
  /// the message says what to change.
  distributed_model(Comm& world, Ex& ex, nn::transformer_config const& config, training_layout const& wanted,
                    options_type const& options, site where = site::here())
      : config_(config), layout_(wanted.resolved(config, layout_demands{options.batch, world.size()}, where)),
        options_(options), mesh_(world, layout_.mesh(), {}, where),
        group_(mesh_, {layout_.sequence_parallel, layout_.form, layout_.assignment}, where) {
    if (options_.sequence_length == 0) options_.sequence_length = config.sequence_length;
    make_units(where);
    share_gradients(where);
    auto const plan =
        layout::make_schedule(layout_.schedule,
                              {.stages = layout_.pipeline,
                               .micro_batches = narrow<int>(layout_.micro_batches(options.batch)),
                               .chunks = layout_.chunks},
                              where);
    auto settings = options.zero;
    settings.stage = layout_.zero;
    settings.reproducible = layout_.reproducible;
    settings.micro_batches = plan.shape.micro_batches;
    settings.open_units =
        layout_.schedule == layout::schedule_kind::zero_bubble ? narrow<int>(units_.size()) : 1;
    settings.meter = options.meter;
    zero_.emplace(ranks(), ex, blocks_, options.optimizer, settings, where);
    pipeline_.emplace(mesh_.along(layout::axis::pipeline), units_, chunks_, plan,
                      pipeline_options{.width = config.width,
                                       .largest = {layout_.micro_batch, options_.sequence_length},
                                       .trace = options.trace,
                                       .meter = options.meter},
                      group_, where);
  }
  distributed_model(distributed_model const&) = delete;
  distributed_model& operator=(distributed_model const&) = delete;

  nn::transformer_config const& config() const noexcept { return config_; }
  /// The resolved one.
  training_layout const& layout() const noexcept { return layout_; }
  partition::mesh<Comm>& mesh() noexcept { return mesh_; }
  group_type const& group() const noexcept { return group_; }

  /// Weights, gradients and optimizer state of this rank's blocks: its units in order, then, on the last
  /// stage of a pipeline with a tied head, its copy of the embedding. `number(u)` is the unit's place in the
  /// model.
  zero_type& state() noexcept { return *zero_; }
  std::size_t number(std::size_t u) const noexcept { return blocks_[u].number; }
  nn::unit_list<Ex, T, G> const& units() const noexcept { return units_; }
  pipeline_type& stages() noexcept { return *pipeline_; }
  /// Every communicator that a step uses, each once: for their meters.
  std::vector<Comm*> communicators() {
    std::vector<Comm*> all{&mesh_.world(), &mesh_.gradient_group()};
    for (auto one : layout::axes_in_order) all.push_back(&mesh_.along(one));
    for (auto* group : {&shards_, &replicas_})
      if (*group) all.push_back(&**group);
    for (auto* lane : pipeline_->communicators()) all.push_back(lane);
    std::sort(all.begin(), all.end());
    all.erase(std::unique(all.begin(), all.end()), all.end());
    return all;
  }

  /// Each weight from the seed, its parameter's name and its place in the whole: the same model whatever the
  /// layout.
  void initialise(Ex& ex, std::uint64_t seed) {
    zero_->start_from(ex, [&](std::size_t u, layout::range part, memory_span<float, memory> out) {
      nn::initialise(ex, zero_->parameters(u), part, out, seed);
    });
  }

  /// One step over the whole batch: all micro-batches, and the update. Of `common` seed, step and gradient
  /// scale count.
  template <sample_supplier<Ex> Supplier>
  update_result step(Ex& ex, Supplier&& batch_of, update_options const& update, nn::pass const& common = {},
                     site where = site::here()) {
    auto const mine = mesh_.coordinate(layout::axis::data);
    pipeline_->run(
        ex, *zero_,
        [&](index_t i) { return micro_batch(batch_of, layout_.micro_batch_of(options_.batch, mine, i)); },
        common);
    return zero_->update(ex, pipeline_->losses(ex), update, where);
  }

  /// The summed loss of `samples` samples, without dropout, smoothing or z-loss.
  template <sample_supplier<Ex> Supplier>
  nn::loss_sum evaluate(Ex& ex, index_t samples, Supplier&& batch_of) {
    auto const mine = layout_.share(samples, mesh_.coordinate(layout::axis::data));
    auto const at = [&](index_t i) { return (std::min)(mine.begin + i * layout_.micro_batch, mine.end); };
    auto const local = pipeline_->evaluate(ex, *zero_, layout_.micro_batches(samples), [&](index_t i) {
      return micro_batch(batch_of, {at(i), at(i + 1)});
    });
    return sum_over_ranks(mesh_.world(), local);
  }

private:
  template <sample_supplier<Ex> Supplier>
  pipeline_micro_batch<Ex> micro_batch(Supplier& batch_of, layout::range samples) {
    local_samples<Ex> const got = batch_of(samples);
    return {.tokens = got.tokens,
            .targets = got.targets,
            .whole_length = options_.sequence_length,
            .first_sample = samples.begin};
  }

  void make_units(site where) {
    auto const stage = mesh_.coordinate(layout::axis::pipeline);
    for (int chunk = 0; chunk < layout_.chunks; ++chunk) {
      auto const part = units_of_part(config_, layout_.parts(), chunk * layout_.pipeline + stage);
      auto const begin = std::ssize(units_);
      for (auto& u : nn::make_transformer<Ex, T, G>(config_, group_, part, where))
        units_.push_back(static_cast<std::unique_ptr<nn::unit<Ex, T, G>>&&>(u));
      chunks_.push_back({begin, std::ssize(units_)});
      for (auto number = part.begin; number < part.end; ++number)
        blocks_.push_back({.number = static_cast<std::size_t>(number)});
    }
    for (std::size_t u = 0; u < units_.size(); ++u) {
      units_[u]->recompute(layout_.recompute);
      blocks_[u].map = &units_[u]->parameters();
    }
    if (units_.back()->tied_to().empty()) return;
    blocks_.back().tied = 0;
    if (layout_.pipeline == 1) return;
    // The embedding is on the first stage: this one, the last, has a copy.
    blocks_.back().tied = blocks_.size();
    borrowed_ = nn::embedding_parameters(config_, group_);
    blocks_.push_back({.map = &borrowed_, .owned = false, .number = 0});
  }

  /// Hybrid sharding: neighbours share, and the groups of neighbours are replicas.
  void share_gradients(site where) {
    auto const group = layout_.shard_group;
    if (group == 0 || group == layout_.gradient_ranks()) return;
    auto& all = mesh_.gradient_group();
    shards_.emplace(all.split(all.rank() / group, all.rank(), where));
    replicas_.emplace(all.split(all.rank() % group, all.rank(), where));
  }

  zero_ranks<Comm> ranks() {
    zero_ranks<Comm> who{.gradients = shards_ ? *shards_ : mesh_.gradient_group(), .world = mesh_.world()};
    if (replicas_) who.replicas = &*replicas_;
    if (layout_.tensor > 1) who.tensor = &mesh_.along(layout::axis::tensor);
    auto const stages = layout_.pipeline, stage = mesh_.coordinate(layout::axis::pipeline);
    if (config_.tied_head && stages > 1 && (stage == 0 || stage + 1 == stages))
      who.shared_block = {.pipeline = &mesh_.along(layout::axis::pipeline),
                          .peer = stage == 0 ? stages - 1 : 0,
                          .unit = stage == 0 ? 0 : blocks_.size() - 1};
    return who;
  }

  nn::transformer_config config_;
  training_layout layout_;
  options_type options_;
  partition::mesh<Comm> mesh_;
  group_type group_;
  nn::unit_list<Ex, T, G> units_;
  std::vector<layout::range> chunks_; ///< Of units_.
  std::vector<zero_unit> blocks_;
  layout::parameter_map borrowed_; ///< Of the last stage's copy of the embedding.
  std::optional<Comm> shards_, replicas_;
  std::optional<zero_type> zero_;
  std::optional<pipeline_type> pipeline_;
};

} // namespace tessera::inline TESSERA_ABI::parallel

#endif
