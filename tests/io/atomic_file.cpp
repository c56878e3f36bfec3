#include <doctest/doctest.h>

#include <csignal>
#include <cstdlib>

#include <sys/mount.h>
#include <sys/resource.h>
#include <sys/wait.h>

#include <tessera/io/atomic_file.hpp>

#include "support/temporary_folder.hpp"
#include "support/thrown.hpp"

using namespace tessera;

namespace {

/// Limits the size of files while it lives: a full disk that needs no disk.
class file_size_limit {
public:
  explicit file_size_limit(rlim_t bytes) {
    ::getrlimit(RLIMIT_FSIZE, &before_);
    auto limit = before_;
    limit.rlim_cur = bytes;
    handler_ = std::signal(SIGXFSZ, SIG_IGN);
    ::setrlimit(RLIMIT_FSIZE, &limit);
  }
  ~file_size_limit() {
    ::setrlimit(RLIMIT_FSIZE, &before_);
    std::signal(SIGXFSZ, handler_);
  }

private:
  rlimit before_{};
  void (*handler_)(int) = nullptr;
};

/// A file system of 64 KiB, where the test may mount one.
class small_disk {
public:
  explicit small_disk(std::string const& at) : at_(at) {
    std::filesystem::create_directory(at_);
    mounted_ = ::mount("none", at_.c_str(), "tmpfs", 0, "size=64k") == 0;
  }
  ~small_disk() {
    if (mounted_) ::umount(at_.c_str());
  }
  bool mounted() const { return mounted_; }

private:
  std::string at_;
  bool mounted_ = false;
};

} // namespace

TEST_CASE("a file appears at its commit, with all that was written, in pieces of any size") {
  test::temporary_folder const folder;
  std::string expected;
  io::atomic_file file(folder / "file");
  for (std::size_t size : {0u, 1u, 13u, 65535u, 65536u, 65537u, 3u, 200000u, 7u}) {
    std::string piece(size, '\0');
    for (std::size_t n = 0; n < size; ++n) piece[n] = static_cast<char>('a' + (n * 7 + size) % 26);
    file.write(piece);
    expected += piece;
  }
  CHECK(file.bytes() == static_cast<index_t>(expected.size()));
  CHECK_FALSE(io::file_exists(folder / "file"));
  file.commit();
  CHECK(test::contents_of(folder / "file") == expected);
  CHECK(io::names_in(folder.path()).size() == 1);
  CHECK(test::error_of<config_error>([&] { file.write("more"); }).id == "E-io-009");
  CHECK(test::error_of<config_error>([&] { file.commit(); }).id == "E-io-009");
}

TEST_CASE("without a commit the old file stays and nothing else remains") {
  test::temporary_folder const folder;
  io::write_file(folder / "file", "old");
  {
    io::atomic_file file(folder / "file");
    file.write("new");
    auto const moved = std::move(file);
  }
  CHECK(test::contents_of(folder / "file") == "old");
  CHECK(io::names_in(folder.path()).size() == 1);
  io::write_file(folder / "file", "new");
  CHECK(test::contents_of(folder / "file") == "new");
}

TEST_CASE("a header is rewritten in place, and only where something was written") {
  test::temporary_folder const folder;
  io::atomic_file file(folder / "file");
  file.write("0000body");
  std::string const header = "1234";
  auto const bytes = std::as_bytes(std::span(header.data(), header.size()));
  file.rewrite(0, bytes);
  file.write("tail");
  CHECK(test::error_of<size_error>([&] { file.rewrite(9, bytes); }).id == "E-io-008");
  CHECK(test::error_of<size_error>([&] { file.rewrite(-1, bytes); }).id == "E-io-008");
  file.commit();
  CHECK(test::contents_of(folder / "file") == "1234bodytail");
}

TEST_CASE("two writers of one file do not disturb each other: the last commit stays") {
  test::temporary_folder const folder;
  io::atomic_file first(folder / "file"), second(folder / "file");
  first.write("first");
  second.write("second, longer");
  second.commit();
  CHECK(test::contents_of(folder / "file") == "second, longer");
  first.commit();
  CHECK(test::contents_of(folder / "file") == "first");
}

TEST_CASE("places that cannot be written are errors that name the path") {
  test::temporary_folder const folder;
  auto const open = [](std::string const& path) {
    return test::error_of<io_error>([&] { io::atomic_file file(path); });
  };
  CHECK(open(folder / "missing/file").id == "E-io-004");
  CHECK(open(folder / "missing/file").says("missing/file: No such file"));
  CHECK(open(folder.path()).id == "E-io-002");
  CHECK(open(folder.path() + "/").id == "E-io-002");
}

TEST_CASE("a limit of the file size is reported with its path and loses nothing") {
  test::temporary_folder const folder;
  io::write_file(folder / "file", "old");
  test::thrown error;
  {
    file_size_limit const limit(100'000);
    error = test::error_of<io_error>([&] {
      io::atomic_file file(folder / "file");
      file.write(std::string(90'000, 'x'));
      file.write(std::string(90'000, 'y')); // the system takes 10'000 of these, then none
    });
  }
  CHECK(error.id == "E-io-004");
  CHECK(error.says(folder / "file"));
  CHECK(error.says("no room"));
  CHECK(test::contents_of(folder / "file") == "old");
  CHECK(io::names_in(folder.path()).size() == 1);
}

TEST_CASE("a full disk is reported with its path and its cause and loses nothing") {
  test::temporary_folder const folder;
  small_disk const disk(folder / "disk");
  if (!disk.mounted()) {
    MESSAGE("not run: no right to mount a small disk");
    return;
  }
  io::write_file(folder / "disk/file", "old");
  auto const error =
      test::error_of<io_error>([&] { io::write_file(folder / "disk/file", std::string(100'000, 'x')); });
  CHECK(error.id == "E-io-004");
  CHECK(error.says(folder / "disk/file"));
  CHECK(error.says("No space left on device"));
  CHECK(test::contents_of(folder / "disk/file") == "old");
  CHECK(io::names_in(folder / "disk").size() == 1);
}

TEST_CASE("a device that is always full gives the same error") {
  io::detail::descriptor const full(::open("/dev/full", O_WRONLY | O_CLOEXEC));
  REQUIRE(full.open());
  std::byte const bytes[16] = {};
  auto const error =
      test::error_of<io_error>([&] { io::detail::write_all(full, bytes, "/dev/full", site::here()); });
  CHECK(error.id == "E-io-004");
  CHECK(error.says("cannot write /dev/full: No space left on device"));
}

TEST_CASE("a killed writer leaves the old file, and its leftovers are removed on request") {
  test::temporary_folder const folder;
  io::write_file(folder / "file", "old");
  auto const child = ::fork();
  REQUIRE(child >= 0);
  if (child == 0) {
    io::atomic_file file(folder / "file");
    file.write(std::string(100'000, 'x'));
    ::raise(SIGKILL);
  }
  int status = 0;
  REQUIRE(::waitpid(child, &status, 0) == child);
  REQUIRE(WIFSIGNALED(status));
  CHECK(test::contents_of(folder / "file") == "old");
  CHECK(io::names_in(folder.path()).size() == 2);
  io::write_file(folder / "file", "new"); // beside the leftover
  CHECK(test::contents_of(folder / "file") == "new");
  io::remove_leftovers(folder.path());
  CHECK(io::names_in(folder.path()) == std::vector<std::string>{"file"});
}
