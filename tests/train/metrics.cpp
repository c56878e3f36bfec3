#include <doctest/doctest.h>

#include <csignal>
#include <cstdlib>
#include <utility>

#include <sys/resource.h>
#include <sys/syscall.h>

#include <tessera/train/metrics.hpp>

#include "support/temporary_folder.hpp"
#include "support/thrown.hpp"

using namespace tessera;
using train::metrics_file;
using train::metrics_row;
using train::read_metrics;

namespace {

std::string text_in(std::string const& path) {
  return train::detail::file_text_or_nothing(path, site::here());
}

void append_text(std::string const& path, std::string const& text) {
  auto* const file = std::fopen(path.c_str(), "ab");
  std::fwrite(text.data(), 1, text.size(), file);
  std::fclose(file);
}

/// While it lives, no file grows beyond so many bytes.
class full_disk {
public:
  explicit full_disk(rlim_t bytes) : handler_(std::signal(SIGXFSZ, SIG_IGN)) {
    ::getrlimit(RLIMIT_FSIZE, &before_);
    auto limit = before_;
    limit.rlim_cur = bytes;
    ::setrlimit(RLIMIT_FSIZE, &limit);
  }
  ~full_disk() {
    ::setrlimit(RLIMIT_FSIZE, &before_);
    std::signal(SIGXFSZ, handler_);
  }

private:
  rlimit before_{};
  void (*handler_)(int);
};

std::vector<std::string>* synced = nullptr; // what the calls of fsync were for, while someone asks
int sync_fails = 0;                         // the error of the next call, and the only one

} // namespace

/// In the place of the C library's.
extern "C" int fsync(int descriptor) {
  if (sync_fails != 0) {
    errno = std::exchange(sync_fails, 0);
    return -1;
  }
  if (synced != nullptr)
    synced->push_back(std::filesystem::read_symlink("/proc/self/fd/" + std::to_string(descriptor)).string());
  return static_cast<int>(::syscall(SYS_fsync, descriptor));
}

TEST_CASE("rows read back to the very values that were appended") {
  test::temporary_folder const folder;
  {
    metrics_file file((folder / "metrics.csv"), 0);
    file.append({.step = 1, .tokens = 1e15, .loss = 0.1 + 0.2, .learning_rate = 1e-300});
    file.append({.step = 2, .loss = 3, .validation_loss = 2.5});
  }
  auto const rows = read_metrics((folder / "metrics.csv"));
  REQUIRE(rows.size() == 2);
  CHECK(rows[0].loss == 0.1 + 0.2);
  CHECK(rows[0].tokens == 1e15);
  CHECK(rows[0].learning_rate == 1e-300);
  CHECK(std::isnan(rows[0].validation_loss));
  CHECK(rows[1].validation_loss == 2.5);
  CHECK(text_in((folder / "metrics.csv")).substr(0, 39) == "step,tokens,loss,validation_loss,learni");
}

TEST_CASE("a resumed run keeps the rows up to its step and holds each step once") {
  test::temporary_folder const folder;
  {
    metrics_file file((folder / "metrics.csv"), 0);
    for (int step = 1; step <= 7; ++step) file.append({.step = double(step), .loss = 1.0 * step});
  }
  {
    metrics_file file((folder / "metrics.csv"), 4);
    for (int step = 5; step <= 9; ++step) file.append({.step = double(step), .loss = 10.0 * step});
  }
  auto const rows = read_metrics((folder / "metrics.csv"));
  REQUIRE(rows.size() == 9);
  for (std::size_t i = 0; i < 9; ++i) {
    CHECK(rows[i].step == static_cast<double>(i + 1));
    CHECK(rows[i].loss == (i < 4 ? 1.0 : 10.0) * static_cast<double>(i + 1));
  }
}

TEST_CASE("a line that a kill cut is dropped") {
  test::temporary_folder const folder;
  for (auto const* cut : {"3,", "3,1,2", "3,1,2,,1,1,1,1,1", "step"}) {
    CAPTURE(std::string(cut));
    {
      metrics_file file((folder / "metrics.csv"), 0);
      file.append({.step = 1});
      file.append({.step = 2});
    }
    append_text((folder / "metrics.csv"), cut);
    CHECK(read_metrics((folder / "metrics.csv")).size() == 2);
    metrics_file again((folder / "metrics.csv"), 2);
    again.append({.step = 3});
    CHECK(read_metrics((folder / "metrics.csv")).size() == 3);
  }
}

TEST_CASE("a missing file, an empty one and a cut header have no rows") {
  test::temporary_folder const folder;
  CHECK(read_metrics((folder / "metrics.csv")).empty());
  append_text((folder / "metrics.csv"), "");
  CHECK(read_metrics((folder / "metrics.csv")).empty());
  append_text((folder / "metrics.csv"), "step,tok");
  CHECK(read_metrics((folder / "metrics.csv")).empty());
}

TEST_CASE("a foreign file is refused and left as it was") {
  test::temporary_folder const folder;
  auto const foreign = std::string(200, 'x') + "\n";
  append_text((folder / "metrics.csv"), foreign);
  try {
    metrics_file file((folder / "metrics.csv"), 0);
    FAIL("the foreign file was accepted");
  } catch (io_error const& fault) {
    CHECK(std::string(fault.id()) == "E-train-021");
  }
  CHECK(text_in((folder / "metrics.csv")) == foreign);
}

TEST_CASE("a folder that is not there is an error that names the path") {
  auto const error =
      test::error_of<io_error>([] { metrics_file file("/nonexistent_folder/metrics.csv", 0); });
  CHECK(error.id == "E-io-004");
  CHECK(error.says("/nonexistent_folder"));
}

TEST_CASE("what cannot be read is an error, not a file without rows") {
  test::temporary_folder const folder;
  for (auto const* unreadable : {"/proc/self/mem", "/"}) { // opened by whoever asks, and every read fails
    CAPTURE(std::string(unreadable));
    auto const path = folder / "metrics.csv";
    std::filesystem::create_symlink(unreadable, path);
    auto const error = test::error_of<io_error>([&] { metrics_file file(path, 0); });
    CHECK(error.id == "E-train-020");
    CHECK(error.says("cannot read " + path));
    CHECK(std::filesystem::read_symlink(path) == unreadable); // nothing took its place
    std::filesystem::remove(path);
  }
}

TEST_CASE("a row that has no room is an error, and the rows before it stay") {
  test::temporary_folder const folder;
  auto const path = folder / "metrics.csv";
  {
    metrics_file file(path, 0);
    file.append({.step = 1});
    test::thrown error;
    {
      full_disk const full(text_in(path).size() + 5); // a part of the row is written
      error = test::error_of<io_error>([&] { file.append({.step = 2}); });
    }
    CHECK(error.id == "E-io-004");
    CHECK(error.says("cannot write " + path + ": File too large"));
  }
  CHECK(read_metrics(path).size() == 1);
  auto const before = text_in(path);
  test::thrown error;
  {
    full_disk const full(20);
    error = test::error_of<io_error>([&] { metrics_file file(path, 1); });
  }
  CHECK(error.id == "E-io-004");
  CHECK(text_in(path) == before);
  metrics_file file(path, 1);
  file.append({.step = 2});
  CHECK(read_metrics(path).size() == 2);
}

TEST_CASE("rows, and the file's name, are brought to the disk, and a failure of that is an error") {
  test::temporary_folder const folder;
  auto const path = std::filesystem::canonical(folder.path()).string() + "/metrics.csv";
  std::vector<std::string> seen;
  synced = &seen;
  metrics_file file(path, 0);
  CHECK(seen.size() == 2);
  CHECK(seen.back() + "/metrics.csv" == path);
  seen.clear();
  file.append({.step = 1});
  CHECK(seen.empty());
  file.sync();
  synced = nullptr;
  CHECK(seen == std::vector{path});

  for (auto const cause : {EIO, ENOSPC, EINTR, EINVAL}) {
    CAPTURE(cause);
    sync_fails = cause;
    auto const error = test::error_of<io_error>([&] { file.sync(); });
    sync_fails = 0;
    auto const passes = cause == EINTR || cause == EINVAL; // tried again; a file system without syncing
    CHECK(error.id == (passes ? "nothing was thrown" : "E-io-005"));
    if (!passes) CHECK(error.says("cannot bring to the disk " + path + ": " + std::strerror(cause)));
  }
}
