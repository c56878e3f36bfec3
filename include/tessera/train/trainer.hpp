/// The training loop: samples -> forward and backward over micro-batches -> gradients summed over the ranks
/// -> optimizer -> metrics, validation, checkpoints. A run that finds a checkpoint in its folder goes on from
/// it with the same bits as if it had never stopped.
///
///     exec::host ex({.threads = 2});
///     train::trainer<comm::mpi, exec::host, bf16> trainer(comm, ex, settings, {.out = stderr});
///     trainer.run();                                   // to the last step, then the report in the run's
///     folder
///
/// Called by every rank of `comm`. Every decision (stop, save, refuse) is made from values that are the same
/// on all ranks, or is agreed upon first, so that an error on one rank ends all of them. Exists under
/// TESSERA_WITH_JSON, TESSERA_WITH_XXHASH and TESSERA_WITH_SENTENCEPIECE.
#ifndef TESSERA_TRAIN_TRAINER_HPP
#define TESSERA_TRAIN_TRAINER_HPP

#if defined(TESSERA_WITH_JSON) && defined(TESSERA_WITH_XXHASH) && defined(TESSERA_WITH_SENTENCEPIECE)

#include <chrono>

#include <tessera/data/sampler.hpp>
#include <tessera/nn/model.hpp>
#include <tessera/optim/schedule.hpp>
#include <tessera/parallel/data_parallel.hpp>
#include <tessera/train/agreement.hpp>
#include <tessera/train/checkpoint.hpp>
#include <tessera/train/corpus.hpp>
#include <tessera/train/layout_settings.hpp>
#include <tessera/train/machine.hpp>
#include <tessera/train/metrics.hpp>
#include <tessera/train/micro_batches.hpp>
#include <tessera/train/model_settings.hpp>
#include <tessera/train/progress.hpp>

namespace tessera::inline TESSERA_ABI::train {

struct trainer_options {
  std::FILE* out = nullptr; ///< Where rank 0 shows progress; null: nowhere.
  bool terminal = false;    ///< Redraw one line instead of printing many.
};

/// T is the storage type of weights and activations; gradients are summed in fp32.
template <comm::communicator Comm, exec::space Ex, storage_scalar T>
  requires parallel::communicates_for<Comm, Ex>
class trainer {
public:
  using gradient = float;
  using replicas_type = parallel::data_parallel<Comm, Ex, T, gradient>;

  /// Opens the data, makes the model, and goes back to the latest checkpoint if there is one. Throws, on all
  /// ranks, for settings that differ between ranks or cannot be, for data that cannot be used, and for a
  /// checkpoint of another run.
  trainer(Comm& comm, Ex& ex, settings chosen, trainer_options options = {}, site where = site::here())
      : comm_(comm), ex_(ex), settings_(agreed(comm, std::move(chosen), where)), options_(options),
        shown_(options.out, {.terminal = options.terminal,
                             .every = settings_.log_every,
                             .silent = options.out == nullptr || comm.rank() != 0}),
        text_(open_corpus(comm, settings_, where)), layout_(replicated(where)),
        order_(text_.training.size(), {.seed = seed()}),
        share_(layout::shard_of(settings_.batch, comm.size(), comm.rank())),
        model_(model_config(settings_, text_.vocabulary), largest_micro_batch(), {.meter = &memory_}, where),
        replicas_(comm, ex, parallel::flat_model_of(model_.store()), adamw_options(settings_),
                  {.zero = layout_.zero,
                   .bucket_bytes = static_cast<index_t>(settings_.bucket_mib * (1 << 20)),
                   .meter = &memory_},
                  where),
        rate_(schedule_options(settings_)),
        tokens_(ex, {largest_micro_batch().batch, settings_.sequence_length}, {&memory_, memory_kind::data}),
        targets_(ex, {largest_micro_batch().batch, settings_.sequence_length},
                 {&memory_, memory_kind::data}) {
    comm_.meter().time_calls(true);
    initialise();
    resume(where);
    if (settings_.measure_peak) peak_ = comm_.all_reduce(matrix_peak<T>(ex_));
    for (auto const& note : ex_.notes()) shown_.note(note);
  }

  /// Trains to the last step, validates on all validation samples, and leaves a checkpoint.
  void run(site where = site::here()) {
    while (step_ < settings_.steps) {
      auto row = train_step(where);
      auto const last = step_ == settings_.steps;
      if (last || due(settings_.validate_every)) {
        validation_ = validate(last ? 0 : settings_.validation_samples);
        row.validation_loss = parallel::mean_of(validation_);
      }
      on_root(
          comm_, [&] { metrics_->append(row, where); }, where);
      show(row);
      if (last || due(settings_.checkpoint_every)) save(where);
    }
    if (validation_.count == 0) validation_ = validate(0);
    shown_.end_line();
  }

  settings const& chosen() const noexcept { return settings_; }
  corpus const& text() const noexcept { return text_; }
  nn::model<Ex, T, gradient>& model() noexcept { return model_; }
  memory_meter const& memory() const noexcept { return memory_; }
  index_t step() const noexcept { return step_; }
  /// Of the last validation, over all ranks.
  nn::loss_sum validation() const noexcept { return validation_; }
  /// Operations a second of all ranks in large matrix products; 0: not measured.
  double peak() const noexcept { return peak_; }
  Comm& ranks() noexcept { return comm_; }
  Ex& space() noexcept { return ex_; }
  progress& shown() noexcept { return shown_; }

  std::string metrics_path() const { return settings_.run + "/metrics.csv"; }
  std::string checkpoints() const { return settings_.run + "/checkpoints"; }

private:
  using token_view = typename nn::model<Ex, T, gradient>::token_view;
  using clock = std::chrono::steady_clock;
  static double seconds_since(clock::time_point start) {
    return std::chrono::duration<double>(clock::now() - start).count();
  }

  std::uint64_t seed() const { return static_cast<std::uint64_t>(settings_.seed); }
  bool due(index_t every) const { return every > 0 && step_ % every == 0; }

  /// The settings, once it is certain that they are possible and the same on every rank.
  static settings agreed(Comm& comm, settings chosen, site where) {
    together(
        comm, [&] { check(chosen, where); }, where);
    require_agreement(comm, chosen, where);
    return chosen;
  }

  parallel::training_layout replicated(site where) const {
    auto const l = layout_of(settings_, where)
                       .resolved(model_config(settings_, text_.vocabulary),
                                 {.batch = settings_.batch, .ranks = comm_.size()}, where);
    if (l.data != comm_.size() || l.zero > 1 || l.shard_group != 0 || l.reproducible ||
        l.recompute != nn::recomputation::none)
      throw config_error("E-train-007", where, "the trainer does not take the layout ", text_of(l));
    return l;
  }

  nn::batch_shape largest_micro_batch() const {
    auto const largest_share = layout::shard_of(settings_.batch, comm_.size(), 0).size();
    return {(std::min)(layout_.micro_batch, largest_share), settings_.sequence_length};
  }

  /// Weights in storage precision, masters in fp32: both from the same numbers.
  void initialise() {
    nn::initialise(ex_, model_.store(), seed());
    replicas_.start_from(ex_, [&](std::size_t unit, layout::range part, auto out) {
      nn::initialise(ex_, model_.store().parameters(unit), part, out, seed());
    });
  }

  run_state state() const {
    return {.step = step_,
            .position = step_ * settings_.batch,
            .chosen = settings_,
            .data = text_.fingerprint,
            .vocabulary = text_.vocabulary,
            .layout = rounding_of(layout_)};
  }

  void resume(site where) {
    auto const checkpoint = latest_checkpoint(comm_, checkpoints(), where);
    if (!checkpoint.empty()) {
      auto const saved = read_state(comm_, checkpoint, where);
      together(
          comm_, [&] { require_same(saved, state(), settings_.allow_difference, checkpoint, where); }, where);
      load_checkpoint(comm_, ex_, checkpoint, model_.store(), replicas_, where);
      step_ = saved.step;
      first_position_ = saved.position - step_ * settings_.batch;
      shown_.note("resumed from " + checkpoint);
    }
    on_root(
        comm_,
        [&] {
          io::make_folders(settings_.run, where);
          io::remove_leftovers(settings_.run, where); // a killed run's
          io::write_json(settings_.run + "/settings.json", json_of(settings_), where);
          metrics_.emplace(metrics_path(), step_, where);
        },
        where);
  }

  /// Samples [part) of this step's batch, or of the validation samples, where the space reads them. The one
  /// before is no longer needed: its loss has been read.
  template <class SampleAt>
  std::pair<token_view, token_view> fill(data::token_dataset const& from, layout::range part,
                                         SampleAt&& sample_at, site where) {
    for (auto i = part.begin; i < part.end; ++i) {
      auto const row = i - part.begin;
      from.fill(sample_at(i), tokens_.host()[row].span(), targets_.host()[row].span(), where);
    }
    return {tokens_.upload(ex_).slice(0, 0, part.size()), targets_.upload(ex_).slice(0, 0, part.size())};
  }

  metrics_row train_step(site where) {
    auto const start = clock::now();
    auto const waited = comm_.meter().total().seconds;
    auto const first = first_position_ + step_ * settings_.batch;
    auto const parts = micro_batches(share_, layout_.micro_batch);
    nn::loss_sum loss;
    for (auto const& part : parts) {
      auto const [tokens, targets] = fill(
          text_.training, part, [&](index_t i) { return order_.sample_at(first + i); }, where);
      auto const is_last = &part == &parts.back();
      loss += model_.forward_backward(ex_, tokens, targets,
                                      {.seed = seed(),
                                       .step = static_cast<std::uint64_t>(step_),
                                       .first_sample = part.begin,
                                       .accumulate = &part != &parts.front()},
                                      [&](std::size_t unit) {
                                        if (is_last) replicas_.gradients_ready(unit);
                                      });
    }
    if (parts.empty()) replicas_.nothing_to_add(ex_);
    auto const learning_rate = rate_(step_);
    auto const done = replicas_.update(
        ex_, loss, {.step = step_ + 1, .learning_rate = learning_rate, .clip_norm = settings_.clip}, where);
    ++step_;
    auto const mean = parallel::mean_of(done.loss);
    if (!done.applied) refuse_step(mean, done.gradient_norm, where);

    auto const seconds = seconds_since(start);
    auto const per_second = done.loss.count / seconds;
    return {.step = static_cast<double>(step_),
            .tokens = static_cast<double>(step_ * settings_.batch * settings_.sequence_length),
            .loss = mean,
            .learning_rate = learning_rate,
            .gradient_norm = done.gradient_norm,
            .tokens_per_second = per_second,
            .peak_share = peak_ > 0 ? per_second * operations_per_token(model_) / peak_ : 0,
            .communication_share = (comm_.meter().total().seconds - waited) / seconds};
  }

  /// Loss and norm are the same on every rank, so every rank comes here or none does.
  [[noreturn]] void refuse_step(double loss, double norm, site where) {
    shown_.end_line();
    auto const kept = io::commits_in(checkpoints(), where);
    throw numeric_error(
        "E-train-070", where, "step ", step_, ": the loss is ", loss, " and the gradient's norm ", norm,
        "; the step was not taken and no checkpoint was made of it. ",
        kept.empty() ? "There is no earlier checkpoint" : "The last good checkpoint is " + kept.back().path,
        "; lower learning_rate (", settings_.learning_rate,
        "), lengthen warm_up_steps, or look for broken data");
  }

  /// Over `samples` samples spread evenly over the validation part, or all of them (0).
  nn::loss_sum validate(index_t samples, site where = site::here()) {
    auto const all = text_.validation.size();
    auto const count = samples == 0 || samples > all ? all : samples;
    nn::loss_sum loss;
    auto const mine = layout::shard_of(count, comm_.size(), comm_.rank());
    for (auto const& part : micro_batches(mine, largest_micro_batch().batch)) {
      auto const [tokens, targets] = fill(
          text_.validation, part, [&](index_t i) { return i * all / count; }, where);
      loss += model_.evaluate(ex_, tokens, targets, where);
    }
    return parallel::sum_over_ranks(comm_, loss);
  }

  void save(site where) {
    auto const path =
        save_checkpoint(comm_, ex_, checkpoints(), state(), model_.store(), replicas_,
                        {.keep = settings_.keep, .tokenizer_model = text_.tokenizer.model()}, where);
    if (step_ == settings_.steps) shown_.note("checkpoint " + path);
  }

  void show(metrics_row const& row) {
    auto const blend = seconds_a_step_ == 0 ? 1.0 : 0.1;
    auto const seconds =
        static_cast<double>(settings_.batch * settings_.sequence_length) / row.tokens_per_second;
    seconds_a_step_ += blend * (seconds - seconds_a_step_);
    shown_.show({.step = step_,
                 .steps = settings_.steps,
                 .loss = row.loss,
                 .validation_loss = validation_.count > 0 ? parallel::mean_of(validation_) : -1,
                 .learning_rate = row.learning_rate,
                 .gradient_norm = row.gradient_norm,
                 .tokens_per_second = row.tokens_per_second,
                 .peak_share = row.peak_share,
                 .communication_share = row.communication_share,
                 .seconds_left = seconds_a_step_ * static_cast<double>(settings_.steps - step_)});
  }

  Comm& comm_;
  Ex& ex_;
  settings settings_;
  trainer_options options_;
  progress shown_;
  memory_meter memory_;
  corpus text_;
  parallel::training_layout layout_;
  data::sampler order_;
  layout::range share_; ///< Of the batch's samples: this rank's.
  nn::model<Ex, T, gradient> model_;
  replicas_type replicas_;
  optim::schedule rate_;
  exec::staged<std::int32_t, 2, Ex> tokens_, targets_;
  std::optional<metrics_file> metrics_; ///< On rank 0.
  index_t step_ = 0;                    ///< Steps done.
  index_t first_position_ = 0; ///< Of the sampler at step 0; other than 0 after an allowed other batch.
  nn::loss_sum validation_;
  double peak_ = 0;
  double seconds_a_step_ = 0;
};

} // namespace tessera::inline TESSERA_ABI::train

#endif
#endif
