/// Settings as JSON: one flat object with a key for each row of the settings table. Keys that are left out
/// keep their defaults; unknown keys are errors that name the nearest.
///
///     auto s = train::read_settings("config.json");
///     io::write_json("run/config.json", train::json_of(s));
#ifndef TESSERA_TRAIN_SETTINGS_JSON_HPP
#define TESSERA_TRAIN_SETTINGS_JSON_HPP

#if defined(TESSERA_WITH_JSON)

#include <tessera/io/json.hpp>
#include <tessera/train/settings.hpp>

namespace tessera::inline TESSERA_ABI::train {

/// In the table's order: every setting, or those alone that decide the run's numbers and are compared one by
/// one.
inline io::json json_of(settings const& s, bool bound_alone = false) {
  auto object = io::json::object();
  for (auto const& f : fields)
    if (!bound_alone || f.bound == binding::refused)
      std::visit([&](auto member) { object[std::string(f.name)] = s.*member; }, f.member);
  return object;
}

/// Throws config_error for unknown keys, wrong types and values that a setting cannot take. `source` is what
/// messages call the object.
inline settings settings_of(io::json const& object, std::string const& source, site where = site::here()) {
  settings s;
  io::json_reader read(object, source, where);
  for (auto const& f : fields) {
    std::visit([&](auto member) { s.*member = read.optional(std::string(f.name), s.*member, where); },
               f.member);
    check(s, f, where);
  }
  read.finish(where);
  return s;
}

inline settings read_settings(std::string const& path, site where = site::here()) {
  return settings_of(io::read_json(path, where), path, where);
}

} // namespace tessera::inline TESSERA_ABI::train

#endif
#endif
