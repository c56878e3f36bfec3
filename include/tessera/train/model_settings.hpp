/// Settings turned into what the other rooms take: the model's config, the optimizer's and the schedule's
/// options, and the work of one token.
#ifndef TESSERA_TRAIN_MODEL_SETTINGS_HPP
#define TESSERA_TRAIN_MODEL_SETTINGS_HPP

#include <algorithm>

#include <tessera/layout/parameters.hpp>
#include <tessera/nn/transformer_config.hpp>
#include <tessera/optim/adamw.hpp>
#include <tessera/optim/schedule.hpp>
#include <tessera/train/settings.hpp>

namespace tessera::inline TESSERA_ABI::train {

inline nn::transformer_config model_config(settings const& s, index_t vocabulary) {
  return {.family = s.family == "gpt2" ? nn::transformer_family::gpt2 : nn::transformer_family::llama,
          .vocabulary_size = vocabulary,
          .sequence_length = s.sequence_length,
          .width = s.width,
          .layers = s.layers,
          .heads = s.heads,
          .key_value_heads = s.key_value_heads,
          .feed_forward = s.feed_forward,
          .dropout = static_cast<float>(s.dropout),
          .tied_head = s.tied_head,
          .norm_epsilon = static_cast<float>(s.norm_epsilon),
          .rotary_theta = static_cast<float>(s.rotary_theta),
          .label_smoothing = static_cast<float>(s.label_smoothing),
          .z_loss = static_cast<float>(s.z_loss)};
}

inline optim::adamw_options adamw_options(settings const& s) {
  return {.beta1 = s.beta1, .beta2 = s.beta2, .epsilon = s.epsilon, .weight_decay = s.weight_decay};
}

inline optim::schedule_options schedule_options(settings const& s) {
  auto const fifth = (std::min)(s.steps / 5, s.steps - s.warm_up_steps);
  return {.form = optim::schedule_form_named(s.schedule),
          .peak = s.learning_rate,
          .final_fraction = s.final_rate_share,
          .steps = s.steps,
          .warm_up = {s.warm_up_steps},
          .decay = s.decay_steps == 0 ? fifth : s.decay_steps};
}

/// Floating-point operations of forward and backward for one token, of the matrix products alone: 6 for each
/// weight that takes part in one, and 6 T width a layer for attention over T tokens, half of which a token
/// sees on average (Narayanan et al., "Efficient large-scale language model training", 2021).
/// `units` are those of the whole model.
inline double operations_per_token(nn::transformer_config const& config,
                                   std::vector<layout::parameter_map> const& units) {
  index_t weights = 0;
  for (auto const& map : units)
    for (auto const& p : map) {
      auto const multiplied = p.kind == layout::parameter_kind::matrix ||
                              (p.kind == layout::parameter_kind::token_embedding && config.tied_head);
      if (multiplied) weights += p.whole_size();
    }
  return 6.0 * static_cast<double>(weights) +
         6.0 * static_cast<double>(config.layers * config.sequence_length * config.width);
}

} // namespace tessera::inline TESSERA_ABI::train

#endif
