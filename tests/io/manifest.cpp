// requires: json xxhash
#include <doctest/doctest.h>

#include <tessera/io/manifest.hpp>

#include "support/temporary_folder.hpp"
#include "support/thrown.hpp"

using namespace tessera;

namespace {

io::manifest example() {
  std::string const weights = "headerAAAABB";
  return {100,
          {{"model.safetensors",
            12,
            io::checksum_of(weights),
            {{"w \"quoted\"", 6, 4, io::checksum_of("AAAA")}, {"b", 10, 2, io::checksum_of("BB")}}},
           {"state.json", 3, io::checksum_of("{}\n"), {}},
           {"empty", 0, io::checksum_of(""), {}}}};
}

void put_example(std::string const& folder) {
  test::put(folder + "/model.safetensors", "headerAAAABB");
  test::put(folder + "/state.json", "{}\n");
  test::put(folder + "/empty", "");
}

} // namespace

TEST_CASE("a manifest reads back as it was written, and its text is the same every time") {
  test::temporary_folder const folder;
  auto const text = io::manifest_text(example());
  CHECK(text == io::manifest_text(example()));
  test::put(folder / "manifest.json", text);
  CHECK(io::read_manifest(folder / "manifest.json") == example());
  test::put(folder / "manifest.json", io::manifest_text({0, {}}));
  CHECK(io::read_manifest(folder / "manifest.json") == io::manifest{});
}

TEST_CASE("a manifest that was cut anywhere or altered by one bit is refused") {
  test::temporary_folder const folder;
  auto const path = folder / "manifest.json";
  auto const text = io::manifest_text(example());
  auto const refused = [&](std::string const& altered) {
    test::put(path, altered);
    auto const error = test::error_of<io_error>([&] { io::read_manifest(path); });
    return error.says(path);
  };
  for (std::size_t length = 0; length < text.size(); ++length) {
    CAPTURE(length);
    REQUIRE(refused(text.substr(0, length)));
  }
  CHECK(refused(text + " "));
  for (std::size_t bit = 0; bit < text.size() * 8; ++bit) {
    auto altered = text;
    altered[bit / 8] = static_cast<char>(altered[bit / 8] ^ (1 << bit % 8));
    CAPTURE(bit);
    REQUIRE(refused(altered));
  }
  CHECK(refused("{}"));
  CHECK(refused("[1, 2]"));
  CHECK(refused(
      "{\"step\": 1, \"files\": [{\"name\": \"a\", \"bytes\": 1, \"xxh3\": \"no\", \"tensors\": []}]}"));
}

TEST_CASE("files that are as the manifest says pass") {
  test::temporary_folder const folder;
  put_example(folder.path());
  io::check_files(example(), folder.path());
}

TEST_CASE("a missing, cut, longer or altered file is named, and so are its damaged tensors") {
  test::temporary_folder const folder;
  auto const check = [&] {
    return test::error_of<io_error>([&] { io::check_files(example(), folder.path()); });
  };
  put_example(folder.path());
  test::put(folder / "model.safetensors", "headerAAAABC");
  CHECK(check().id == "E-io-033");
  CHECK(check().says("model.safetensors was altered"));
  CHECK(check().says("damaged: tensor b ["));
  test::put(folder / "model.safetensors", "headerABAABC");
  CHECK(check().says("damaged: tensor w \"quoted\" and 1 more"));
  test::put(folder / "model.safetensors", "hEaderAAAABB");
  CHECK(check().says("damaged: its header"));
  test::put(folder / "model.safetensors", "headerAAAAB");
  CHECK(check().id == "E-io-032");
  CHECK(check().says("it was cut"));

  put_example(folder.path());
  test::put(folder / "empty", "x");
  CHECK(check().id == "E-io-032");
  CHECK(check().says("empty has 1 bytes"));
  io::remove_all(folder / "state.json");
  CHECK(check().id == "E-io-031");
  CHECK(check().says("state.json"));
}
