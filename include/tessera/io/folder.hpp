/// Folders: make, list, remove. Paths are strings; a std::filesystem::path converts by itself (and its
/// header, which costs more than all of ours, stays out of here).
///
///     io::make_folders("runs/first/checkpoints");
///     for (auto const& name : io::names_in("runs/first")) ...
#ifndef TESSERA_IO_FOLDER_HPP
#define TESSERA_IO_FOLDER_HPP

#include <algorithm>
#include <string>
#include <vector>

#include <dirent.h>

#include <tessera/io/detail/posix.hpp>

namespace tessera::inline TESSERA_ABI::io {

inline bool file_exists(std::string const& path) noexcept {
  struct stat status {};
  return ::stat(path.c_str(), &status) == 0 && S_ISREG(status.st_mode);
}

inline bool folder_exists(std::string const& path) noexcept {
  struct stat status {};
  return ::stat(path.c_str(), &status) == 0 && S_ISDIR(status.st_mode);
}

/// Makes the folder and those above it; one that is there already is fine. The names of those that were made
/// are on the disk afterwards, unless this user may not read the folder that they stand in, which syncing
/// needs. Cost: one sync for each folder made.
inline void make_folders(std::string const& path, site where = site::here()) {
  if (path.empty() || folder_exists(path)) return;
  auto const above = detail::folder_of(path);
  if (above != path) make_folders(above, where);
  if (::mkdir(path.c_str(), 0777) != 0) {
    if (errno == EEXIST && folder_exists(path)) return;
    detail::fail("E-io-006", where, "make the folder", path, errno);
  }
  if (::access(above.c_str(), R_OK) == 0) detail::sync_path(above, where);
}

/// The names in a folder, sorted; without "." and "..".
inline std::vector<std::string> names_in(std::string const& path, site where = site::here()) {
  auto* const folder = ::opendir(path.c_str());
  if (folder == nullptr) detail::fail("E-io-001", where, "open the folder", path, errno);
  std::vector<std::string> names;
  int cause = 0;
  try {
    while (true) {
      errno = 0;
      auto const* const entry = ::readdir(folder);
      if (entry == nullptr) {
        cause = errno;
        break;
      }
      std::string name = entry->d_name;
      if (name != "." && name != "..") names.push_back(std::move(name));
    }
  } catch (...) {
    ::closedir(folder);
    throw;
  }
  ::closedir(folder);
  if (cause != 0) detail::fail("E-io-001", where, "read the folder", path, cause);
  std::sort(names.begin(), names.end());
  return names;
}

/// Removes a file, or a folder with all that is in it (links are removed, not followed). What is not there
/// counts as removed.
inline void remove_all(std::string const& path, site where = site::here()) {
  struct stat status {};
  if (::lstat(path.c_str(), &status) != 0) {
    if (errno == ENOENT) return;
    detail::fail("E-io-007", where, "remove", path, errno);
  }
  if (S_ISDIR(status.st_mode)) {
    for (auto const& name : names_in(path, where)) remove_all(path + "/" + name, where);
    if (::rmdir(path.c_str()) != 0 && errno != ENOENT) detail::fail("E-io-007", where, "remove", path, errno);
  } else if (::unlink(path.c_str()) != 0 && errno != ENOENT) {
    detail::fail("E-io-007", where, "remove", path, errno);
  }
}

} // namespace tessera::inline TESSERA_ABI::io

#endif
