/// Everything that decides the numbers of a run, as it stands in a checkpoint's state.json. A run goes on
/// only under the same; what differs is refused by name unless the user says that this very difference is
/// meant.
///
///     require_same(saved, current, settings.allow_difference, "run/checkpoints/step-00000100");
#ifndef TESSERA_TRAIN_RUN_STATE_HPP
#define TESSERA_TRAIN_RUN_STATE_HPP

#if defined(TESSERA_WITH_JSON)

#include <tessera/train/settings_json.hpp>

namespace tessera::inline TESSERA_ABI::train {

struct run_state {
  index_t step = 0;     ///< Steps done.
  index_t position = 0; ///< Of the sampler: samples consumed since the run began.
  settings chosen;
  std::string optimizer = "adamw";
  std::string data; ///< The corpus's fingerprint.
  index_t vocabulary = 0;
  std::string layout; ///< What decides the rounding of sums over ranks (rounding_of in layout_settings.hpp).
  std::string arithmetic; ///< What decides the rounding within a rank (`arithmetic` of the execution space).
};

/// Of the settings, those that decide the numbers: where a run lies and how often it speaks is not its state.
inline io::json json_of(run_state const& s) {
  return {{"format", "tessera run 3"},
          {"step", s.step},
          {"position", s.position},
          {"optimizer", s.optimizer},
          {"data", s.data},
          {"vocabulary", s.vocabulary},
          {"layout", s.layout},
          {"arithmetic", s.arithmetic},
          {"settings", json_of(s.chosen, true)}};
}

/// Throws io_error if it is not the state of a run of this version; `source` is what messages call it.
inline run_state run_state_of(io::json const& object, std::string const& source, site where = site::here()) {
  try {
    io::json_reader read(object, source, where);
    if (read.required<std::string>("format", where) != "tessera run 3")
      throw io_error("E-train-050", where, source, " is of another format than \"tessera run 3\"");
    run_state s;
    s.step = read.required<index_t>("step", where);
    s.position = read.required<index_t>("position", where);
    s.optimizer = read.required<std::string>("optimizer", where);
    s.data = read.required<std::string>("data", where);
    s.vocabulary = read.required<index_t>("vocabulary", where);
    s.layout = read.required<std::string>("layout", where);
    s.arithmetic = read.required<std::string>("arithmetic", where);
    read.section("settings", where);
    read.finish(where);
    s.chosen = settings_of(object.at("settings"), source + ": settings", where);
    return s;
  } catch (config_error const& fault) {
    throw io_error("E-train-050", where, source, " is not the state of a run: ", fault.what());
  }
}

/// One thing that differs, under the name by which it can be allowed.
struct run_difference {
  std::string name, saved, current;
};

inline std::vector<run_difference> differences(run_state const& saved, run_state const& current) {
  std::vector<run_difference> found;
  auto const compare = [&](std::string_view name, std::string a, std::string b) {
    if (a != b) found.push_back({std::string(name), std::move(a), std::move(b)});
  };
  compare("data", saved.data, current.data);
  compare("optimizer", saved.optimizer, current.optimizer);
  compare("layout", saved.layout, current.layout);
  if (saved.chosen.device == current.chosen.device) // another device says it already
    compare("arithmetic", saved.arithmetic, current.arithmetic);
  for (auto const& f : fields)
    if (f.bound == binding::refused)
      compare(f.name, value_text(saved.chosen, f), value_text(current.chosen, f));
  return found;
}

/// Throws config_error for a name that no difference has.
inline void check_allowed(std::vector<std::string> const& allowed, site where = site::here()) {
  for (auto const& name : allowed)
    if (name != "data" && name != "optimizer" && name != "arithmetic") (void)field_of(name, where);
}

/// Throws config_error that lists every difference that is not allowed.
inline void require_same(run_state const& saved, run_state const& current,
                         std::vector<std::string> const& allowed, std::string const& checkpoint,
                         site where = site::here()) {
  auto const is_allowed = [&](std::string const& name) {
    return std::find(allowed.begin(), allowed.end(), name) != allowed.end();
  };
  std::string list, remedy;
  for (auto const& d : differences(saved, current)) {
    if (is_allowed(d.name)) continue;
    list += tessera::text_of("\n  ", d.name, ": ", d.saved, " there, ", d.current, " here");
    remedy += " --allow-difference " + d.name;
  }
  if (!list.empty())
    throw config_error("E-train-051", where, "the checkpoint ", checkpoint,
                       " belongs to a run that differs from this one:", list,
                       "\nuse another folder (--run), restore the settings, or, if it is meant, say", remedy);
}

} // namespace tessera::inline TESSERA_ABI::train

#endif
#endif
