/// One program at a time in a folder: a lock that ends with the program, however that ends.
///
///     io::folder_lock const lock("run");      // io_error if another program works there
///
/// The lock is on the empty file `run/.lock`, which stays. Taken by one process of a job (rank 0).
#ifndef TESSERA_IO_FOLDER_LOCK_HPP
#define TESSERA_IO_FOLDER_LOCK_HPP

#include <string>

#include <sys/file.h>

#include <tessera/io/detail/posix.hpp>

namespace tessera::inline TESSERA_ABI::io {

class folder_lock {
public:
  /// Throws io_error: E-io-039 while another program holds the lock, E-io-040 where the file system has no
  /// locks (whoever knows that no other program works there may go on without).
  explicit folder_lock(std::string const& folder, site where = site::here()) {
    auto const path = folder + "/.lock";
    file_ = detail::descriptor(::open(path.c_str(), O_RDWR | O_CREAT | O_CLOEXEC, 0666));
    if (!file_.open()) detail::fail("E-io-004", where, "write", path, errno);
    while (::flock(file_.number(), LOCK_EX | LOCK_NB) != 0) {
      if (errno == EINTR) continue;
      if (errno == EWOULDBLOCK)
        throw io_error("E-io-039", where, "another program is working in ", folder,
                       ": wait for it, end it, or choose another folder");
      detail::fail("E-io-040", where, "lock", path, errno);
    }
  }

private:
  detail::descriptor file_;
};

} // namespace tessera::inline TESSERA_ABI::io

#endif
