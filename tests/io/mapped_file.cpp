#include <doctest/doctest.h>

#include <tessera/io/mapped_file.hpp>

#include "support/temporary_folder.hpp"
#include "support/thrown.hpp"

using namespace tessera;

TEST_CASE("a mapped file shows the bytes of the file, also after it was moved") {
  test::temporary_folder const folder;
  std::string const text("one\0two\n", 8);
  test::put(folder / "file", text);
  io::mapped_file first(folder / "file");
  auto file = std::move(first);
  CHECK(file.text() == text);
  CHECK(file.size() == 8);
  io::mapped_file other;
  CHECK(other.size() == 0);
  other = std::move(file);
  CHECK(other.text() == text);
  CHECK(other.path() == folder / "file");
}

TEST_CASE("the bytes stay while the name is given to another file") {
  test::temporary_folder const folder;
  test::put(folder / "file", "old bytes");
  io::mapped_file const file(folder / "file");
  test::put(folder / "new", "new");
  std::filesystem::rename(folder / "new", folder / "file");
  CHECK(file.text() == "old bytes");
}

TEST_CASE("what cannot be mapped is an error that names the path and says why") {
  test::temporary_folder const folder;
  test::put(folder / "empty", "");
  REQUIRE(::mkfifo((folder / "pipe").c_str(), 0600) == 0);
  auto const open = [](std::string const& path) {
    return test::error_of<io_error>([&] { io::mapped_file file(path); });
  };
  CHECK(open(folder / "missing").id == "E-io-001");
  CHECK(open(folder / "missing").says("missing: No such file"));
  CHECK(open(folder / "empty").id == "E-io-003");
  CHECK(open(folder / "empty").says("is empty"));
  CHECK(open(folder.path()).id == "E-io-002");
  CHECK(open(folder.path()).says("it is a folder"));
  CHECK(open(folder / "pipe").id == "E-io-002");
  CHECK(open("/dev/null").id == "E-io-002");
}
