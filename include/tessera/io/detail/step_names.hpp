/// The names of checkpoint folders, and how one takes another's place.
#ifndef TESSERA_IO_DETAIL_STEP_NAMES_HPP
#define TESSERA_IO_DETAIL_STEP_NAMES_HPP

#include <string>
#include <string_view>
#include <utility>

#include <tessera/io/folder.hpp>

namespace tessera::inline TESSERA_ABI::io::detail {

/// "step-00000100": names sort like steps.
inline std::string step_name(index_t step) {
  auto digits = std::to_string(step);
  if (digits.size() < 8) digits.insert(0, 8 - digits.size(), '0');
  return "step-" + digits;
}

/// The step of a folder's name; -1 if it is not exactly such a name.
inline index_t step_of(std::string_view name) {
  if (name.substr(0, 5) != "step-" || name.size() < 13 || name.size() > 5 + 18) return -1;
  index_t step = 0;
  for (char digit : name.substr(5)) {
    if (digit < '0' || digit > '9') return -1;
    step = step * 10 + (digit - '0');
  }
  return step_name(step) == name ? step : -1;
}

/// The step and the ending of a hidden name such as ".step-00000100.pending"; -1 for other names.
inline std::pair<index_t, std::string_view> hidden_step_of(std::string_view name) {
  auto const dot = name.rfind('.');
  if (name.empty() || name.front() != '.' || dot == 0) return {-1, {}};
  return {step_of(name.substr(1, dot - 1)), name.substr(dot + 1)};
}

/// Renames a folder onto `target`. If one is there, the two change places in one step where the file system
/// can; elsewhere the old one is set aside as ".NAME.replaced" in between, from where recovery brings it
/// back.
inline void put_in_place(std::string const& pending, std::string const& target, site where) {
  if (::rename(pending.c_str(), target.c_str()) == 0) return; // also onto an empty folder
  if (errno != ENOTEMPTY && errno != EEXIST) fail("E-io-005", where, "put in place", target, errno);
#if defined(RENAME_EXCHANGE)
  if (::renameat2(AT_FDCWD, pending.c_str(), AT_FDCWD, target.c_str(), RENAME_EXCHANGE) == 0) return;
#endif
  auto const aside = folder_of(target) + "/." + name_of(target) + ".replaced";
  remove_all(aside, where);
  if (::rename(target.c_str(), aside.c_str()) != 0 || ::rename(pending.c_str(), target.c_str()) != 0)
    fail("E-io-005", where, "put in place", target, errno);
  sync_path(folder_of(target), where);
  remove_all(aside, where);
}

} // namespace tessera::inline TESSERA_ABI::io::detail

#endif
