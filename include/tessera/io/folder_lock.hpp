/// One program at a time in a folder: a lock that ends with the program, however that ends.
///
///     io::folder_lock const lock("run");                     // io_error if another program works there
///     io::folder_lock const next("run", {.patience = 2});    // waits for a program that is ending
///
/// The lock is on the empty file `run/.lock`, which stays. Taken by one process of a job (rank 0).
#ifndef TESSERA_IO_FOLDER_LOCK_HPP
#define TESSERA_IO_FOLDER_LOCK_HPP

#include <chrono>
#include <string>
#include <thread>

#include <sys/file.h>

#include <tessera/io/detail/posix.hpp>

namespace tessera::inline TESSERA_ABI::io {

struct folder_lock_options {
  double patience = 0;  ///< Seconds; a program that was killed holds its lock until the system has ended it.
  bool required = true; ///< Otherwise a file system without locks is no error, and `held` tells.
};

class folder_lock {
public:
  /// Throws io_error: E-io-039 while another program holds the lock, E-io-040 where the file system has no
  /// locks and one is required.
  explicit folder_lock(std::string const& folder, folder_lock_options options = {},
                       site where = site::here()) {
    using clock = std::chrono::steady_clock;
    auto const until = clock::now() + std::chrono::duration<double>(options.patience);
    auto const path = folder + "/.lock";
    file_ = detail::descriptor(::open(path.c_str(), O_RDWR | O_CREAT | O_CLOEXEC, 0666));
    if (!file_.open()) detail::fail("E-io-004", where, "write", path, errno);
    while (::flock(file_.number(), LOCK_EX | LOCK_NB) != 0) {
      if (errno == EINTR) continue;
      if (errno != EWOULDBLOCK && !options.required) return;
      if (errno != EWOULDBLOCK) detail::fail("E-io-040", where, "lock", path, errno);
      if (clock::now() >= until)
        throw io_error("E-io-039", where, "another program is working in ", folder,
                       ": wait for it, end it, or choose another folder");
      std::this_thread::sleep_for(std::chrono::milliseconds(20));
    }
    held_ = true;
  }

  bool held() const noexcept { return held_; }

private:
  detail::descriptor file_;
  bool held_ = false;
};

} // namespace tessera::inline TESSERA_ABI::io

#endif
