/// A file's bytes as a span, mapped read-only: nothing is copied, and pages are read when they are touched.
///
///     io::mapped_file file("tokens.bin");
///     file.bytes();
///
/// The file must not be cut while it is mapped (the writers of this library never do: they rename).
#ifndef TESSERA_IO_MAPPED_FILE_HPP
#define TESSERA_IO_MAPPED_FILE_HPP

#include <string>
#include <string_view>
#include <utility>

#include <sys/mman.h>

#include <tessera/io/detail/posix.hpp>

namespace tessera::inline TESSERA_ABI::io {

class mapped_file {
public:
  mapped_file() = default;
  /// Throws io_error if the path is missing, unreadable, not a regular file, or empty.
  explicit mapped_file(std::string path, site where = site::here()) : path_(std::move(path)) {
    // O_NONBLOCK: a named pipe is refused below instead of being waited for.
    detail::descriptor const file(::open(path_.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK));
    if (!file.open()) detail::fail("E-io-001", where, "open", path_, errno);
    struct stat status {};
    if (::fstat(file.number(), &status) != 0) detail::fail("E-io-001", where, "read", path_, errno);
    if (!S_ISREG(status.st_mode))
      throw io_error("E-io-002", where, "cannot read ", path_, ": it is ",
                     S_ISDIR(status.st_mode) ? "a folder" : "not a regular file");
    if (status.st_size == 0) throw io_error("E-io-003", where, "the file ", path_, " is empty");
    size_ = static_cast<std::size_t>(status.st_size);
    auto* const memory = ::mmap(nullptr, size_, PROT_READ, MAP_SHARED, file.number(), 0);
    if (memory == MAP_FAILED) detail::fail("E-io-001", where, "map", path_, errno);
    data_ = static_cast<std::byte const*>(memory);
  }
  mapped_file(mapped_file&& other) noexcept { swap(other); }
  mapped_file& operator=(mapped_file&& other) noexcept {
    mapped_file(std::move(other)).swap(*this);
    return *this;
  }
  ~mapped_file() {
    if (data_ != nullptr) ::munmap(const_cast<std::byte*>(data_), size_);
  }

  std::span<std::byte const> bytes() const noexcept { return {data_, size_}; }
  std::string_view text() const noexcept { return {reinterpret_cast<char const*>(data_), size_}; }
  index_t size() const noexcept { return static_cast<index_t>(size_); }
  std::string const& path() const noexcept { return path_; }

  void swap(mapped_file& other) noexcept {
    path_.swap(other.path_);
    std::swap(data_, other.data_);
    std::swap(size_, other.size_);
  }

private:
  std::string path_;
  std::byte const* data_ = nullptr;
  std::size_t size_ = 0;
};

} // namespace tessera::inline TESSERA_ABI::io

#endif
