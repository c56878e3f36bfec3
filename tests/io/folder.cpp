#include <doctest/doctest.h>

#include <sys/syscall.h>

#include <tessera/io/folder.hpp>

#include "support/temporary_folder.hpp"
#include "support/thrown.hpp"

using namespace tessera;

namespace {

std::vector<std::string>* synced = nullptr; // what the calls of fsync were for, while someone asks

} // namespace

/// In the place of the C library's.
extern "C" int fsync(int descriptor) {
  if (synced != nullptr)
    synced->push_back(std::filesystem::read_symlink("/proc/self/fd/" + std::to_string(descriptor)).string());
  return static_cast<int>(::syscall(SYS_fsync, descriptor));
}

TEST_CASE("folders are made with those above them, and making them again is fine") {
  test::temporary_folder const folder;
  io::make_folders(folder / "a/b/c");
  CHECK(io::folder_exists(folder / "a/b/c"));
  io::make_folders(folder / "a/b/c/");
  io::make_folders(folder / "a/b");
}

TEST_CASE("the names of folders that were made are brought to the disk, and no others") {
  test::temporary_folder const folder;
  auto const path = std::filesystem::canonical(folder.path()).string();
  std::vector<std::string> seen;
  auto const make = [&](std::string const& name) {
    seen.clear();
    synced = &seen;
    io::make_folders(folder / name);
    synced = nullptr;
  };
  make("a");
  CHECK(seen == std::vector{path});
  make("a/b/c");
  CHECK(seen == std::vector{path + "/a", path + "/a/b"});
  make("a/b/c/");
  CHECK(seen.empty());
  make("d/e/");
  CHECK(seen == std::vector{path, path + "/d"});
}

TEST_CASE("a folder is made in one that may be written but not read") {
  test::temporary_folder const folder;
  io::make_folders(folder / "closed");
  REQUIRE(::chmod((folder / "closed").c_str(), 0333) == 0);
  io::make_folders(folder / "closed/inner"); // root reads it all the same
  CHECK(io::folder_exists(folder / "closed/inner"));
  REQUIRE(::chmod((folder / "closed").c_str(), 0777) == 0);
}

TEST_CASE("a file in the way of a folder is an error that names the path") {
  test::temporary_folder const folder;
  test::put(folder / "taken", "x");
  auto const error = test::error_of<io_error>([&] { io::make_folders(folder / "taken/inner"); });
  CHECK(error.id == "E-io-006");
  CHECK(error.says("taken"));
  CHECK(io::file_exists(folder / "taken"));
  CHECK_FALSE(io::folder_exists(folder / "taken"));
}

TEST_CASE("names come sorted, and those of a missing folder are an error") {
  test::temporary_folder const folder;
  for (auto const* name : {"b", "a", ".hidden", "c"}) test::put(folder / name, "");
  CHECK(io::names_in(folder.path()) == std::vector<std::string>{".hidden", "a", "b", "c"});
  CHECK(test::error_of<io_error>([&] { io::names_in(folder / "missing"); }).id == "E-io-001");
}

TEST_CASE("removing takes whole trees, does not follow links, and accepts what is not there") {
  test::temporary_folder const folder;
  io::make_folders(folder / "tree/inner");
  test::put(folder / "tree/inner/file", "x");
  test::put(folder / "outside", "kept");
  std::filesystem::create_symlink(folder / "outside", folder / "tree/link");
  io::remove_all(folder / "tree");
  io::remove_all(folder / "tree");
  CHECK(io::names_in(folder.path()) == std::vector<std::string>{"outside"});
}
