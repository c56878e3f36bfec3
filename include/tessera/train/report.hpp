/// What a finished run leaves to be read: loss.svg, sample.txt and summary.json in its folder, and a short
/// account on the terminal: losses beside the entropies of the simplest models, memory by kind beside the
/// ZeRO formula, and a sample of text.
///
///     trainer.run();
///     train::report(trainer, stdout, "mpi");   // called by every rank; rank 0 writes
#ifndef TESSERA_TRAIN_REPORT_HPP
#define TESSERA_TRAIN_REPORT_HPP

#if defined(TESSERA_WITH_JSON) && defined(TESSERA_WITH_XXHASH) && defined(TESSERA_WITH_SENTENCEPIECE)

#include <tessera/nn/initialise.hpp>
#include <tessera/train/generate.hpp>
#include <tessera/train/loss_curve.hpp>
#include <tessera/train/summary.hpp>
#include <tessera/train/trainer.hpp>

namespace tessera::inline TESSERA_ABI::train {

namespace detail {

/// The figures of a run that the summary and the account are made from.
struct run_figures {
  double training_loss = 0; ///< Nats per token, mean over the last twentieth of the steps.
  double tokens_per_second = 0, peak_share = 0, communication_share = 0, seconds = 0;
};

/// The first step of a process prepares kernels and touches memory; it counts in `seconds` alone.
inline run_figures figures_of(std::vector<metrics_row> const& rows) {
  run_figures f;
  auto const last = (std::max)(std::size_t{1}, rows.size() / 20);
  auto tokens = 0.0, seconds = 0.0, before = 0.0;
  for (std::size_t i = 0; i < rows.size(); ++i) {
    auto const& row = rows[i];
    auto const own = row.tokens - before, time = own / row.tokens_per_second;
    before = row.tokens;
    f.seconds += time;
    if (i + last >= rows.size()) f.training_loss += row.loss / static_cast<double>(last);
    if (i == 0 && rows.size() > 1) continue;
    tokens += own;
    seconds += time;
    f.peak_share += row.peak_share * time;
    f.communication_share += row.communication_share * time;
  }
  if (seconds > 0) {
    f.tokens_per_second = tokens / seconds;
    f.peak_share /= seconds;
    f.communication_share /= seconds;
  }
  return f;
}

/// Per byte of text where there is text, else per token.
inline double per_unit(double nats_per_token, double bytes_per_token) {
  return bytes_per_token > 0 ? nats_per_token / bytes_per_token : nats_per_token;
}

inline index_t parameter_count(whole_model const& whole) {
  index_t count = 0;
  for (auto const& map : whole.units) count += map.parameter_count();
  return count;
}

template <comm::communicator Comm, exec::space Ex, storage_scalar T>
std::string sample_text(trainer<Comm, Ex, T>& t) {
  auto const& s = t.chosen();
  if (s.sample_tokens == 0 || !t.text().tokenizer.has_text()) return {};
  auto prompt = t.text().tokenizer.encode(s.prompt);
  if (prompt.empty()) prompt.push_back(0);
  // No rank need hold all weights; the checkpoint does. Before a first one they are the starting values.
  auto units = t.whole_units();
  nn::parameter_store<Ex, T, float> store(units, {.gradients = false});
  if (t.checkpoint().empty())
    nn::initialise(t.space(), store, static_cast<std::uint64_t>(s.seed));
  else
    load_weights(t.space(), t.checkpoint(), store);
  nn::decoder<Ex, T, float> decoder(units, store, t.model().config());
  auto const more =
      generate(t.space(), decoder, prompt, s.sample_tokens, {.temperature = 0.7, .top_p = 0.95},
               philox(static_cast<std::uint64_t>(s.seed), layout::stream_of("sample")), [](std::int32_t) {});
  return s.prompt + t.text().tokenizer.decode(more);
}

template <comm::communicator Comm, exec::space Ex, storage_scalar T>
std::string run_title(trainer<Comm, Ex, T>& t) {
  auto const& s = t.chosen();
  char size[32];
  std::snprintf(size, sizeof size, "%.1f M", static_cast<double>(parameter_count(t.whole())) / 1e6);
  auto const& layout = t.model().layout();
  auto const ranks = layout.ranks();
  auto const axes = ranks == layout.data ? std::string() : " (" + text_of(layout.mesh()) + ")";
  return tessera::text_of(s.family, ", ", size, " parameters, ", scalar_name<T>(), ", ", ranks,
                          ranks == 1 ? " rank" : " ranks", axes, ", ZeRO-", layout.zero, ", seed ", s.seed);
}

template <comm::communicator Comm, exec::space Ex, storage_scalar T>
std::string run_picture(trainer<Comm, Ex, T>& t, std::vector<metrics_row> const& rows) {
  auto const& text = t.text();
  auto const has_text = text.tokenizer.has_text();
  auto const name = t.chosen().data.substr(t.chosen().data.find_last_of('/') + 1);
  loss_curve_options picture{
      .title = name, .subtitle = run_title(t), .unit = has_text ? "nats per byte" : "nats per token"};
  for (auto const& row : rows) {
    picture.training.push_back({row.step, per_unit(row.loss, text.training_bytes_per_token)});
    if (std::isfinite(row.validation_loss))
      picture.validation.push_back(
          {row.step, per_unit(row.validation_loss, text.validation_bytes_per_token)});
  }
  if (has_text)
    picture.levels = {{"unigram", text.statistics.unigram_entropy},
                      {"bigram", text.statistics.bigram_entropy}};
  return loss_curve(picture);
}

inline io::json json_of(bytes_by_kind const& bytes) {
  auto object = io::json::object();
  for (std::size_t kind = 0; kind < bytes.size(); ++kind)
    if (bytes[kind] >= 0) object[name_of(static_cast<memory_kind>(kind))] = bytes[kind];
  return object;
}

} // namespace detail

/// Called by every rank when `run` has returned. `communicator` is what the summary calls the kind of ranks.
template <comm::communicator Comm, exec::space Ex, storage_scalar T>
void report(trainer<Comm, Ex, T>& t, std::FILE* out, std::string const& communicator,
            site where = site::here()) {
  auto peaks = peaks_of(t.memory());
  auto const add = [&](memory_meter const& meter) {
    auto const more = peaks_of(meter);
    for (std::size_t kind = 0; kind < peaks.size(); ++kind) peaks[kind] += more[kind];
  };
  for (auto* group : t.model().communicators()) add(group->memory());
  add(t.space().scratch());
  t.ranks().all_reduce(std::span<index_t>(peaks), {.operation = comm::reduction::max});
  index_t held = 0; // parameters of this rank's units, whole or in shards
  for (std::size_t u = 0; u < t.model().units().size(); ++u)
    held += t.model().state().parameters(u).parameter_count();
  held = t.ranks().all_reduce(held, {.operation = comm::reduction::max});
  on_root(
      t.ranks(),
      [&] {
        auto const& s = t.chosen();
        auto const& text = t.text();
        auto const& layout = t.model().layout();
        auto const rows = read_metrics(t.metrics_path(), where);
        auto const f = detail::figures_of(rows);
        auto const validation = parallel::mean_of(t.validation());
        auto const training_loss = detail::per_unit(f.training_loss, text.training_bytes_per_token);
        auto const validation_loss = detail::per_unit(validation, text.validation_bytes_per_token);
        auto const formula = zero_formula(
            held, {.ranks = layout.shard_group == 0 ? layout.gradient_ranks() : layout.shard_group,
                   .zero = layout.zero,
                   .weight_bytes = sizeof(T),
                   .gradient_bytes = sizeof(float),
                   .state_bytes = optim::adamw<Ex, T>::state_bytes({})});
        auto const sample = detail::sample_text(t);
        io::write_file(s.run + "/loss.svg", detail::run_picture(t, rows), where);
        io::write_file(s.run + "/sample.txt", sample + "\n", where);
        io::write_json(s.run + "/summary.json",
                       {{"steps", t.step()},
                        {"parameters", detail::parameter_count(t.whole())},
                        {"unit_of_loss", text.tokenizer.has_text() ? "nats per byte" : "nats per token"},
                        {"training_loss", training_loss},
                        {"validation_loss", validation_loss},
                        {"validation_loss_per_token", validation},
                        {"unigram_entropy", text.statistics.unigram_entropy},
                        {"bigram_entropy", text.statistics.bigram_entropy},
                        {"bytes_per_token", text.validation_bytes_per_token},
                        {"vocabulary", text.vocabulary},
                        {"seconds", f.seconds},
                        {"tokens_per_second", f.tokens_per_second},
                        {"matrix_peak_share", f.peak_share},
                        {"matrix_peak_operations_per_second", t.peak()},
                        {"communication_share", f.communication_share},
                        {"peak_bytes", detail::json_of(peaks)},
                        {"zero_formula_bytes", detail::json_of(formula)},
                        {"layout",
                         {{"communicator", communicator},
                          {"ranks", t.ranks().size()},
                          {"runs_on", t.space().description()},
                          {"zero_stage", layout.zero},
                          {"text", text_of(layout)}}},
                        {"storage", std::string(scalar_name<T>())},
                        {"seed", s.seed}},
                       where);
        auto const unit = text.tokenizer.has_text() ? "nats per byte" : "nats per token";
        std::fprintf(out, "\n%s, %lld steps in %s\n\n", detail::run_title(t).c_str(),
                     static_cast<long long>(t.step()), duration_text(f.seconds).c_str());
        std::fprintf(out, "training loss    %8.4f %s\nvalidation loss  %8.4f %s\n", training_loss, unit,
                     validation_loss, unit);
        if (text.tokenizer.has_text())
          std::fprintf(out, "bigram entropy   %8.4f %s of the text\nunigram entropy  %8.4f %s of the text\n",
                       text.statistics.bigram_entropy, unit, text.statistics.unigram_entropy, unit);
        std::fprintf(out, "speed            %8s tokens/s, ", rate_text(f.tokens_per_second).c_str());
        if (f.peak_share > 0) std::fprintf(out, "%.0f%% of the matrix peak, ", 100 * f.peak_share);
        std::fprintf(out, "%.0f%% in communication\n\n", 100 * f.communication_share);
        std::fprintf(out, "%s\n", memory_table(peaks, formula).c_str());
        if (!sample.empty()) std::fprintf(out, "%s\n\n", sample.c_str());
        std::fprintf(out, "in %s: summary.json, metrics.csv, loss.svg, sample.txt, checkpoints/\n",
                     s.run.c_str());
      },
      where);
}

} // namespace tessera::inline TESSERA_ABI::train

#endif
#endif
