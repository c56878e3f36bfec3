#include <doctest/doctest.h>

#include <tessera/io/folder.hpp>

#include "support/temporary_folder.hpp"
#include "support/thrown.hpp"

using namespace tessera;

TEST_CASE("folders are made with those above them, and making them again is fine") {
  test::temporary_folder const folder;
  io::make_folders(folder / "a/b/c");
  CHECK(io::folder_exists(folder / "a/b/c"));
  io::make_folders(folder / "a/b/c/");
  io::make_folders(folder / "a/b");
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
