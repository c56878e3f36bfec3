/// A file that is either complete or not there: bytes go to a temporary name beside the target, and `commit`
/// brings them to the disk and renames. A crash, an exception or a full disk before that leaves the old file
/// as it was.
///
///     io::atomic_file file("run/metrics.json");
///     file.write(text);
///     file.commit();
///
/// Cost: the bytes once, two syncs. Leftovers of a killed program are called `.NAME.partial-K`;
/// `remove_leftovers(folder)` removes them when nobody else is writing there.
#ifndef TESSERA_IO_ATOMIC_FILE_HPP
#define TESSERA_IO_ATOMIC_FILE_HPP

#include <string_view>
#include <utility>
#include <vector>

#include <tessera/io/folder.hpp>

namespace tessera::inline TESSERA_ABI::io {

class atomic_file {
public:
  /// Opens the temporary file. Its folder must exist. Throws io_error.
  explicit atomic_file(std::string path, site where = site::here()) : path_(std::move(path)) {
    auto const folder = detail::folder_of(path_);
    auto const name = detail::name_of(path_);
    if (name.empty() || folder_exists(path_))
      throw io_error("E-io-002", where, "cannot write the file ", path_, ": it names a folder");
    // O_EXCL gives each of several writers, and each leftover of a dead one, a name of its own.
    for (int attempt = 0; !file_.open(); ++attempt) {
      temporary_ = tessera::text_of(folder, "/.", name, ".partial-", attempt);
      file_ = detail::descriptor(::open(temporary_.c_str(), O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, 0666));
      if (!file_.open() && (errno != EEXIST || attempt > 9999)) {
        auto const cause = errno;
        temporary_.clear();
        detail::fail("E-io-004", where, "write", path_, cause);
      }
    }
    buffer_.reserve(buffer_bytes);
  }
  atomic_file(atomic_file&& other) noexcept
      : path_(std::move(other.path_)), temporary_(std::exchange(other.temporary_, {})),
        file_(std::move(other.file_)), buffer_(std::move(other.buffer_)), bytes_(other.bytes_) {}
  atomic_file& operator=(atomic_file&&) = delete;
  /// Without a commit, nothing of the file remains.
  ~atomic_file() {
    if (!temporary_.empty()) ::unlink(temporary_.c_str());
  }

  /// Appends. Throws io_error when the disk is full.
  void write(std::span<std::byte const> bytes, site where = site::here()) {
    must_be_open(where);
    bytes_ += static_cast<index_t>(bytes.size());
    if (buffer_.size() + bytes.size() > buffer_bytes) flush(where);
    if (bytes.size() >= buffer_bytes)
      detail::write_all(file_, bytes, path_, where);
    else
      buffer_.insert(buffer_.end(), bytes.begin(), bytes.end());
  }
  void write(std::string_view text, site where = site::here()) {
    write(std::as_bytes(std::span(text.data(), text.size())), where);
  }

  /// Overwrites bytes that were written before, for a header that counts what follows it.
  void rewrite(index_t offset, std::span<std::byte const> bytes, site where = site::here()) {
    must_be_open(where);
    if (offset < 0 || offset > bytes_ - static_cast<index_t>(bytes.size()))
      throw size_error("E-io-008", where, "rewriting ", bytes.size(), " bytes at ", offset, " of ", path_,
                       ", which has ", bytes_);
    flush(where);
    if (::lseek(file_.number(), offset, SEEK_SET) < 0) detail::fail("E-io-004", where, "write", path_, errno);
    detail::write_all(file_, bytes, path_, where);
    if (::lseek(file_.number(), 0, SEEK_END) < 0) detail::fail("E-io-004", where, "write", path_, errno);
  }

  /// Puts the file in its place, replacing an older one. Afterwards it survives a crash of the machine.
  void commit(site where = site::here()) {
    must_be_open(where);
    flush(where);
    detail::sync(file_, path_, where);
    file_.close(path_, where);
    if (::rename(temporary_.c_str(), path_.c_str()) != 0)
      detail::fail("E-io-005", where, "put in place", path_, errno);
    temporary_.clear();
    detail::sync_path(detail::folder_of(path_), where);
  }

  std::string const& path() const noexcept { return path_; }
  /// Bytes written so far.
  index_t bytes() const noexcept { return bytes_; }

private:
  static constexpr std::size_t buffer_bytes = std::size_t{1} << 16;

  void must_be_open(site where) const {
    if (!file_.open())
      throw config_error("E-io-009", where, path_, " was committed, or failed, before; nothing can be added");
  }
  void flush(site where) {
    detail::write_all(file_, buffer_, path_, where);
    buffer_.clear();
  }

  std::string path_;
  std::string temporary_;
  detail::descriptor file_;
  std::vector<std::byte> buffer_;
  index_t bytes_ = 0;
};

/// Writes a whole file at once.
inline void write_file(std::string const& path, std::string_view text, site where = site::here()) {
  atomic_file file(path, where);
  file.write(text, where);
  file.commit(where);
}

/// Removes the temporary files that killed programs left in a folder.
inline void remove_leftovers(std::string const& folder, site where = site::here()) {
  for (auto const& name : names_in(folder, where))
    if (name.front() == '.' && name.find(".partial-") != std::string::npos)
      remove_all(folder + "/" + name, where);
}

} // namespace tessera::inline TESSERA_ABI::io

#endif
