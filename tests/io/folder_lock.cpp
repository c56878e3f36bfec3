#include <doctest/doctest.h>

#include <csignal>
#include <optional>
#include <thread>

#include <sys/wait.h>

#include <tessera/io/folder_lock.hpp>

#include "support/temporary_folder.hpp"
#include "support/thrown.hpp"

using namespace tessera;

TEST_CASE("a folder has one lock at a time") {
  test::temporary_folder const folder;
  std::optional<io::folder_lock> first;
  first.emplace(folder.path());
  auto const second = test::error_of<io_error>([&] { io::folder_lock lock(folder.path()); });
  CHECK(second.id == "E-io-039");
  CHECK(second.says(folder.path()));
  first.reset();
  io::folder_lock const again(folder.path(), {.required = false});
  CHECK(again.held());
}

TEST_CASE("the lock of a killed program is free") {
  test::temporary_folder const folder;
  int ready[2];
  REQUIRE(::pipe(ready) == 0);
  auto const child = ::fork();
  REQUIRE(child >= 0);
  if (child == 0) {
    io::folder_lock const lock(folder.path());
    char const byte = 1;
    if (::write(ready[1], &byte, 1) == 1) ::pause();
    ::_exit(1);
  }
  char byte = 0;
  REQUIRE(::read(ready[0], &byte, 1) == 1);
  CHECK(test::error_of<io_error>([&] { io::folder_lock lock(folder.path()); }).id == "E-io-039");
  ::kill(child, SIGKILL);
  int status = 0;
  REQUIRE(::waitpid(child, &status, 0) == child);
  io::folder_lock const lock(folder.path());
  ::close(ready[0]);
  ::close(ready[1]);
}

TEST_CASE("the lock of a program that ends soon is waited for") {
  test::temporary_folder const folder;
  std::optional<io::folder_lock> first;
  first.emplace(folder.path());
  std::jthread const ends([&] {
    std::this_thread::sleep_for(std::chrono::milliseconds(100));
    first.reset();
  });
  io::folder_lock const second(folder.path(), {.patience = 30});
}

TEST_CASE("a folder that is not there cannot be locked") {
  test::temporary_folder const folder;
  CHECK(test::error_of<io_error>([&] { io::folder_lock lock(folder / "missing"); }).id == "E-io-004");
}
