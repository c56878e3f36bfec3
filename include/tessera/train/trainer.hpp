/// The training loop: samples -> forward and backward over micro-batches -> gradients summed over the ranks
/// -> optimizer -> metrics, validation, checkpoints. A run that finds a checkpoint in its folder goes on from
/// it with the same bits as if it had never stopped.
///
///     exec::host ex({.threads = 2});
///     train::trainer<comm::mpi, exec::host, bf16> trainer(comm, ex, settings, {.out = stderr});
///     trainer.run();                                   // to the last step
///     train::report(trainer, stdout, "mpi");           // train/report.hpp: what the run's folder ends with
///
/// Called by every rank of `comm`. Every decision (stop, save, refuse) is made from values that are the same
/// on all ranks, or is agreed upon first, so that an error on one rank ends all of them. A run's folder is
/// one program's at a time, and all ranks see it. Exists under TESSERA_WITH_JSON, TESSERA_WITH_XXHASH and
/// TESSERA_WITH_SENTENCEPIECE.
#ifndef TESSERA_TRAIN_TRAINER_HPP
#define TESSERA_TRAIN_TRAINER_HPP

#if defined(TESSERA_WITH_JSON) && defined(TESSERA_WITH_XXHASH) && defined(TESSERA_WITH_SENTENCEPIECE)

#include <chrono>

#include <tessera/data/sampler.hpp>
#include <tessera/io/folder_lock.hpp>
#include <tessera/optim/schedule.hpp>
#include <tessera/parallel/distributed_model.hpp>
#include <tessera/train/agreement.hpp>
#include <tessera/train/checkpoint.hpp>
#include <tessera/train/corpus.hpp>
#include <tessera/train/layout_settings.hpp>
#include <tessera/train/machine.hpp>
#include <tessera/train/metrics.hpp>
#include <tessera/train/model_settings.hpp>
#include <tessera/train/progress.hpp>
#include <tessera/train/sample_rows.hpp>

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
  using model_type = parallel::distributed_model<Comm, Ex, T, gradient>;
  using unit_list = nn::unit_list<Ex, T, gradient>;

  /// Opens the data, makes this rank's part of the model, and goes back to the latest checkpoint if there is
  /// one. Throws, on all ranks, for settings that differ between ranks or cannot be, for data that cannot be
  /// used, and for a checkpoint of another run.
  trainer(Comm& comm, Ex& ex, settings chosen, trainer_options options = {}, site where = site::here())
      : comm_(comm), ex_(ex), settings_(agreed(comm, std::move(chosen), where)), options_(options),
        shown_(options.out, {.terminal = options.terminal,
                             .every = settings_.log_every,
                             .silent = options.out == nullptr || comm.rank() != 0}),
        lock_(run_to_itself(where)), text_(open_corpus(comm, settings_, where)),
        order_(text_.training.size(), {.seed = seed()}),
        model_(comm, ex, model_config(settings_, text_.vocabulary), layout_of(settings_, where),
               {.batch = settings_.batch,
                .optimizer = adamw_options(settings_),
                .zero = {.bucket_bytes = static_cast<index_t>(settings_.bucket_mib * (1 << 20))},
                .meter = &memory_},
               where),
        alone_(model_.mesh().along(partition::axis_set()), {}), whole_(whole_model_here()),
        rate_(schedule_options(settings_)), arithmetic_(shared_text(comm, ex.arithmetic())),
        step_rows_(rows(share().size())), evaluation_rows_(rows(model_.layout().micro_batch)) {
    for (auto* group : model_.communicators()) group->meter().time_calls(true);
    model_.initialise(ex_, seed());
    resume(where);
    if (settings_.measure_peak) peak_ = comm_.all_reduce(matrix_peak<T>(ex_));
    show_notes();
  }

  /// Trains to the last step, validates on all validation samples, and leaves a checkpoint.
  void run(site where = site::here()) {
    while (step_ < settings_.steps) {
      auto row = train_step(where);
      show_notes();
      auto const last = step_ == settings_.steps;
      if (last || due(settings_.validate_every)) {
        validation_ = validate(last ? 0 : settings_.validation_samples, where);
        row.validation_loss = parallel::mean_of(validation_);
      }
      on_root(
          comm_, [&] { metrics_->append(row, where); }, where);
      show(row);
      if (last || due(settings_.checkpoint_every)) save(where);
    }
    if (validation_.count == 0) validation_ = validate(0, where);
    if (checkpoint_.empty()) save(where); // of a run without steps
    shown_.end_line();
  }

  settings const& chosen() const noexcept { return settings_; }
  corpus const& text() const noexcept { return text_; }
  model_type& model() noexcept { return model_; }
  /// Of all ranks together: names and shapes of its parameters, unit by unit.
  whole_model const& whole() const noexcept { return whole_; }
  /// The units of the whole model, for one rank that runs it alone (with a store of all weights).
  unit_list whole_units() {
    auto const& config = model_.config();
    return nn::make_transformer<Ex, T, gradient>(config, parallel::model_group<Comm>(alone_),
                                                 {0, nn::unit_count(config)});
  }
  /// The folder of the newest checkpoint that this run wrote or began from; empty: none.
  std::string const& checkpoint() const noexcept { return checkpoint_; }
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
  using clock = std::chrono::steady_clock;
  static double seconds_since(clock::time_point start) {
    return std::chrono::duration<double>(clock::now() - start).count();
  }

  std::uint64_t seed() const { return static_cast<std::uint64_t>(settings_.seed); }
  bool due(index_t every) const { return every > 0 && step_ % every == 0; }

  /// The settings, once it is certain that they are possible and the same on every rank.
  static settings agreed(Comm& comm, settings chosen, site where) {
    together(
        comm,
        [&] {
          check(chosen, where);
          check_allowed(chosen.allow_difference, where);
        },
        where);
    require_agreement(comm, chosen, where);
    return chosen;
  }

  /// On rank 0: makes the run's folder, if there is data to learn from, and keeps other programs out of it.
  std::optional<io::folder_lock> run_to_itself(site where) {
    std::optional<io::folder_lock> lock;
    on_root(
        comm_,
        [&] {
          (void)io::mapped_file(settings_.data, where);
          io::make_folders(settings_.run, where);
          lock.emplace(settings_.run, io::folder_lock_options{.patience = 2, .required = false}, where);
          if (!lock->held())
            shown_.note("this file system has no locks: see to it that no other program uses " +
                        settings_.run);
        },
        where);
    return lock;
  }

  whole_model whole_model_here() {
    whole_model whole;
    for (auto const& u : whole_units()) whole.units.push_back(u->parameters());
    for (auto const& array : optim::adamw<Ex, T>(ex_, 0, {}, {}).state())
      whole.arrays.emplace_back(array.name);
    return whole;
  }
  /// What this rank keeps of the model's units.
  auto parts() {
    return [this](std::size_t unit) { return part_of(unit); };
  }
  unit_part<T, typename Ex::memory> part_of(std::size_t unit) {
    auto& state = model_.state();
    for (std::size_t u = 0; u < state.units(); ++u) {
      if (model_.number(u) != unit) continue;
      unit_part<T, typename Ex::memory> part{.map = &state.parameters(u),
                                             .tensor_rank = model_.group().tensor_rank(),
                                             .weights_at = state.weights_at(u),
                                             .weights = state.weights(u),
                                             .counted = state.counted(u)};
      part.state.resize(whole_.arrays.size());
      for (auto& kept : state.stretches(u)) { // one, or none where this rank updates nothing of it
        part.state_at = kept.where;
        for (std::size_t a = 0; auto const& array : kept.optimizer.state()) part.state[a++] = array.values;
      }
      return part;
    }
    return {};
  }

  /// Samples of a step's batch that this rank works on.
  layout::range share() {
    return model_.layout().share(settings_.batch, model_.mesh().coordinate(layout::axis::data));
  }
  sample_rows<Ex> rows(index_t count) {
    auto const length = settings_.sequence_length;
    return {ex_,
            count,
            length,
            model_.group().positions(length),
            model_.group().local_sequence(length),
            {&memory_, memory_kind::data}};
  }

  run_state state() const {
    return {.step = step_,
            .position = first_position_ + step_ * settings_.batch,
            .chosen = settings_,
            .data = text_.fingerprint,
            .vocabulary = text_.vocabulary,
            .layout = rounding_of(model_.layout()),
            .arithmetic = arithmetic_};
  }

  void resume(site where) {
    auto const checkpoint = latest_checkpoint(comm_, checkpoints(), where);
    if (!checkpoint.empty()) {
      auto const saved = read_state(comm_, checkpoint, where);
      together(
          comm_,
          [&] {
            require_same(saved, state(), settings_.allow_difference, checkpoint, where);
            require_tokenizer(checkpoint, text_.tokenizer.model(), where);
          },
          where);
      load_checkpoint<T>(comm_, ex_, checkpoint, whole_, parts(), where);
      checkpoint_ = checkpoint;
      step_ = saved.step;
      first_position_ = saved.position - step_ * settings_.batch;
      shown_.note("resumed from " + checkpoint);
    }
    on_root(
        comm_,
        [&] {
          io::remove_leftovers(settings_.run, where); // a killed run's
          io::write_json(settings_.run + "/settings.json", json_of(settings_), where);
          metrics_.emplace(metrics_path(), step_, where);
        },
        where);
  }

  double communication_seconds() {
    auto seconds = 0.0;
    for (auto* group : model_.communicators()) seconds += group->meter().total().seconds;
    return seconds;
  }

  metrics_row train_step(site where) {
    auto const start = clock::now();
    auto const waited = communication_seconds();
    auto const first = first_position_ + step_ * settings_.batch;
    auto const mine = share();
    for (auto i = mine.begin; i < mine.end; ++i)
      step_rows_.fill(text_.training, i - mine.begin, order_.sample_at(first + i), where);
    step_rows_.upload(ex_);
    auto const learning_rate = rate_(step_);
    auto const done = model_.step(
        ex_,
        [&](layout::range samples) {
          layout::range const at{samples.begin - mine.begin, samples.end - mine.begin};
          return parallel::local_samples<Ex>{step_rows_.tokens(at), step_rows_.targets(at)};
        },
        {.step = step_ + 1, .learning_rate = learning_rate, .clip_norm = settings_.clip},
        {.seed = seed(), .step = static_cast<std::uint64_t>(step_)}, where);
    ++step_;
    auto const mean = parallel::mean_of(done.loss);
    if (!done.applied) refuse_step(mean, done.gradient_norm, where);

    auto const seconds = seconds_since(start);
    auto const per_second = done.loss.count / seconds;
    return {.step = static_cast<double>(step_),
            .tokens =
                static_cast<double>((first_position_ + step_ * settings_.batch) * settings_.sequence_length),
            .loss = mean,
            .learning_rate = learning_rate,
            .gradient_norm = done.gradient_norm,
            .tokens_per_second = per_second,
            .peak_share =
                peak_ > 0 ? per_second * operations_per_token(model_.config(), whole_.units) / peak_ : 0,
            .communication_share = (communication_seconds() - waited) / seconds};
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
  nn::loss_sum validate(index_t samples, site where) {
    auto const all = text_.validation.size();
    auto const count = samples == 0 || samples > all ? all : samples;
    return model_.evaluate(ex_, count, [&](layout::range part) {
      for (auto i = part.begin; i < part.end; ++i)
        evaluation_rows_.fill(text_.validation, i - part.begin, i * all / count, where);
      evaluation_rows_.upload(ex_);
      return parallel::local_samples<Ex>{evaluation_rows_.tokens({0, part.size()}),
                                         evaluation_rows_.targets({0, part.size()})};
    });
  }

  void save(site where) {
    on_root(
        comm_, [&] { metrics_->sync(where); }, where);
    checkpoint_ =
        save_checkpoint<T>(comm_, ex_, checkpoints(), state(), whole_, parts(),
                           {.keep = settings_.keep, .tokenizer_model = text_.tokenizer.model()}, where);
    if (step_ == settings_.steps) shown_.note("checkpoint " + checkpoint_);
  }

  /// What the space has to say, once.
  void show_notes() {
    auto const& notes = ex_.notes();
    for (; notes_shown_ < notes.size(); ++notes_shown_) shown_.note(notes[notes_shown_]);
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
  std::optional<io::folder_lock> lock_; ///< On rank 0.
  corpus text_;
  data::sampler order_;
  model_type model_;
  partition::mesh<Comm> alone_; ///< Of this rank.
  whole_model whole_;
  optim::schedule rate_;
  std::string arithmetic_; ///< Of rank 0.
  sample_rows<Ex> step_rows_, evaluation_rows_;
  std::optional<metrics_file> metrics_; ///< On rank 0.
  std::string checkpoint_;
  index_t step_ = 0;           ///< Steps done.
  index_t first_position_ = 0; ///< Of the sampler at step 0; other than 0 after an allowed other batch.
  nn::loss_sum validation_;
  double peak_ = 0;
  double seconds_a_step_ = 0;
  std::size_t notes_shown_ = 0;
};

} // namespace tessera::inline TESSERA_ABI::train

#endif
#endif
