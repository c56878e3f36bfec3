/// What the files of this room share: a descriptor that closes itself, and calls of the operating system
/// whose failures become io_error with the path, the system's reason and, for a full disk, the remedy.
#ifndef TESSERA_IO_DETAIL_POSIX_HPP
#define TESSERA_IO_DETAIL_POSIX_HPP

#include <cerrno>
#include <cstddef>
#include <cstdio>
#include <span>
#include <string>
#include <system_error>

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <tessera/core/extents.hpp>

namespace tessera::inline TESSERA_ABI::io::detail {

/// Throws io_error "cannot ACTION PATH: REASON". Every place that a full disk can be met ends here.
[[noreturn]] inline void fail(char const* id, site where, std::string_view action, std::string const& path,
                              int cause) {
  auto const reason = std::generic_category().message(cause);
  auto const full = cause == ENOSPC || cause == EDQUOT || cause == EFBIG;
  throw io_error(id, where, "cannot ", action, " ", path, ": ", reason,
                 full ? " (no room for it: free some space or raise the quota; what was complete before is "
                        "still there)"
                      : "");
}

/// The folder that a path's last name stands in.
inline std::string folder_of(std::string const& path) {
  auto const slash = path.find_last_of('/');
  if (slash == std::string::npos) return ".";
  return slash == 0 ? "/" : path.substr(0, slash);
}

/// The last name of a path.
inline std::string name_of(std::string const& path) {
  auto const slash = path.find_last_of('/');
  return slash == std::string::npos ? path : path.substr(slash + 1);
}

/// Owns an open file descriptor. Move-only.
class descriptor {
public:
  descriptor() = default;
  explicit descriptor(int number) noexcept : number_(number) {}
  descriptor(descriptor&& other) noexcept : number_(other.number_) { other.number_ = -1; }
  descriptor& operator=(descriptor&& other) noexcept {
    if (this != &other) {
      close_quietly();
      number_ = other.number_;
      other.number_ = -1;
    }
    return *this;
  }
  ~descriptor() { close_quietly(); }

  int number() const noexcept { return number_; }
  bool open() const noexcept { return number_ >= 0; }

  /// Closes and reports: some file systems tell of a failed write only here.
  void close(std::string const& path, site where) {
    auto const number = number_;
    number_ = -1;
    if (number >= 0 && ::close(number) != 0 && errno != EINTR) fail("E-io-004", where, "write", path, errno);
  }

private:
  void close_quietly() noexcept {
    if (number_ >= 0) ::close(number_);
    number_ = -1;
  }

  int number_ = -1;
};

/// Writes all bytes, however few the system takes at a time.
inline void write_all(descriptor const& file, std::span<std::byte const> bytes, std::string const& path,
                      site where) {
  constexpr std::size_t at_most = std::size_t{1} << 30;
  while (!bytes.empty()) {
    auto const written =
        ::write(file.number(), bytes.data(), bytes.size() < at_most ? bytes.size() : at_most);
    if (written < 0 && errno == EINTR) continue;
    if (written <= 0) fail("E-io-004", where, "write", path, written < 0 ? errno : ENOSPC);
    bytes = bytes.subspan(static_cast<std::size_t>(written));
  }
}

/// Waits until a file's bytes, or a folder's names, are on the disk.
inline void sync(descriptor const& file, std::string const& path, site where) {
  while (::fsync(file.number()) != 0) {
    if (errno == EINTR) continue;
    if (errno == EINVAL || errno == ENOTSUP) return; // a file system that has no notion of it
    fail("E-io-005", where, "bring to the disk", path, errno);
  }
}

inline void sync_path(std::string const& path, site where) {
  descriptor const file(::open(path.c_str(), O_RDONLY | O_CLOEXEC));
  if (!file.open()) fail("E-io-005", where, "open for syncing", path, errno);
  sync(file, path, where);
}

} // namespace tessera::inline TESSERA_ABI::io::detail

#endif
