/// Settings turned into a layout of ranks, and what of it a resumed run must not change.
///
///     auto layout = train::layout_of(settings).resolved(config, {.batch = settings.batch, .ranks = 8});
#ifndef TESSERA_TRAIN_LAYOUT_SETTINGS_HPP
#define TESSERA_TRAIN_LAYOUT_SETTINGS_HPP

#include <tessera/parallel/layout_text.hpp>
#include <tessera/train/settings.hpp>

namespace tessera::inline TESSERA_ABI::train {

namespace detail {

inline parallel::training_layout layout_as_said(settings const& s, site where) {
  using kind = layout::schedule_kind;
  settings const defaults;
  if (s.layout.empty())
    return {.data = narrow<int>(s.data_ranks),
            .tensor = narrow<int>(s.tensor),
            .pipeline = narrow<int>(s.pipeline),
            .context = narrow<int>(s.context),
            .zero = narrow<int>(s.zero_stage),
            .shard_group = narrow<int>(s.shard_group),
            .sequence_parallel = s.sequence_parallel,
            .form =
                s.context_form == "ring" ? parallel::context_form::ring : parallel::context_form::exchange,
            .assignment = s.context_shards == "zigzag" ? layout::sequence_assignment::zigzag
                                                       : layout::sequence_assignment::contiguous,
            .schedule = s.pipeline_schedule == "gpipe"         ? kind::gpipe
                        : s.pipeline_schedule == "interleaved" ? kind::interleaved_one_forward_one_backward
                        : s.pipeline_schedule == "zero_bubble" ? kind::zero_bubble
                                                               : kind::one_forward_one_backward,
            .chunks = narrow<int>(s.chunks),
            .micro_batch = s.micro_batch,
            .recompute = s.recompute == "unit"        ? nn::recomputation::unit
                         : s.recompute == "attention" ? nn::recomputation::attention
                                                      : nn::recomputation::none,
            .reproducible = s.reproducible};
  for (auto const* name :
       {"data_ranks", "tensor", "pipeline", "context", "zero_stage", "shard_group", "sequence_parallel",
        "context_form", "context_shards", "pipeline_schedule", "chunks", "recompute", "reproducible"})
    if (auto const& f = field_of(name); value_text(s, f) != value_text(defaults, f))
      throw config_error("E-train-007", where, "layout is '", s.layout, "', and ", name, " is ",
                         value_text(s, f), "; say it in the layout, or leave layout empty");
  auto said = parallel::parse_layout(s.layout, where);
  if (said.micro_batch == 0) said.micro_batch = s.micro_batch;
  if (said.micro_batch != s.micro_batch && s.micro_batch != defaults.micro_batch)
    throw config_error("E-train-007", where, "layout is '", s.layout, "', and micro_batch is ", s.micro_batch,
                       "; say it in one place");
  return said;
}

} // namespace detail

/// The layout that the settings name, in one line or one by one. Throws config_error where both are given, or
/// the line cannot be read, or a setting has no meaning in it.
inline parallel::training_layout layout_of(settings const& s, site where = site::here()) {
  auto const said = detail::layout_as_said(s, where);
  if (said.zero != 0 && s.bucket_mib != settings{}.bucket_mib)
    throw config_error("E-train-007", where, "bucket_mib is ", s.bucket_mib, ", and ZeRO stage ", said.zero,
                       " reduces unit by unit; leave it out or choose zero_stage 0");
  return said;
}

/// What decides how a layout's sums are rounded: runs that differ in nothing else go on from each other's
/// checkpoints. Schedules and recomputation change no bit; reproducible sums depend on the micro-batch alone.
inline std::string rounding_of(parallel::training_layout l) {
  l.schedule = parallel::training_layout{}.schedule;
  l.chunks = 1;
  l.recompute = nn::recomputation::none;
  if (l.reproducible) l = {.data = 1, .micro_batch = l.micro_batch, .reproducible = true};
  return text_of(l);
}

} // namespace tessera::inline TESSERA_ABI::train

#endif
