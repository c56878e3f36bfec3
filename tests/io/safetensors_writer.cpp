// requires: json xxhash
#include <doctest/doctest.h>

#include <tessera/io/safetensors_writer.hpp>

#include "support/temporary_folder.hpp"
#include "support/thrown.hpp"

using namespace tessera;

namespace {

std::span<std::byte const> bytes_of(std::string const& text) {
  return std::as_bytes(std::span(text.data(), text.size()));
}

std::string const floats("\0\0\0\0\0\0\x80\x3f\0\0\0\x40\0\0\x40\x40\0\0\x80\x40\0\0\xa0\x40", 24);

} // namespace

TEST_CASE("the format's own examples are written byte for byte") {
  test::temporary_folder const folder;
  {
    io::safetensors_writer file(folder / "a", {{"attn.0", io::dtype::f32, {1, 2, 3}}});
    file.write("attn.0", bytes_of(floats));
    file.commit();
  }
  CHECK(test::contents_of(folder / "a") ==
        std::string("\x40\0\0\0\0\0\0\0", 8) +
            R"({"attn.0":{"dtype":"F32","shape":[1,2,3],"data_offsets":[0,24]}})" + floats);
  {
    io::safetensors_writer file(folder / "b", {{"attn0", io::dtype::f32, {1, 1, 2, 3}}});
    file.write("attn0", bytes_of(floats));
    file.commit();
  }
  CHECK(test::contents_of(folder / "b") ==
        std::string("\x48\0\0\0\0\0\0\0", 8) +
            R"({"attn0":{"dtype":"F32","shape":[1,1,2,3],"data_offsets":[0,24]}})" + "       " + floats);
  io::safetensors_writer(folder / "c", {}).commit();
  CHECK(test::contents_of(folder / "c") == std::string("\x8\0\0\0\0\0\0\0{}      ", 16));
}

TEST_CASE("tensors stand by type, widest first, then by name, and come back equal") {
  test::temporary_folder const folder;
  io::safetensors_writer file(folder / "file",
                              {{"byte", io::dtype::u8, {3}},
                               {"b", io::dtype::f32, {2}},
                               {"none", io::dtype::f32, {0, 5}},
                               {"half", io::dtype::bf16, {1, 1}},
                               {"a", io::dtype::f32, {}},
                               {"long", io::dtype::i64, {1}},
                               {"nothing", io::dtype::u8, {0}}},
                              {{"format", "pt"}, {"about", "\u00e9\n"}});
  std::vector<std::string> order;
  for (auto const& entry : file.entries()) order.push_back(entry.name);
  CHECK(order == std::vector<std::string>{"long", "a", "b", "none", "half", "byte", "nothing"});

  std::map<std::string, std::string> const data{{"long", "12345678"}, {"a", "abcd"},  {"b", "efghijkl"},
                                                {"none", ""},         {"half", "mn"}, {"byte", "opq"},
                                                {"nothing", ""}};
  std::string expected;
  for (auto const& entry : file.entries()) {
    file.write(entry.name, bytes_of(data.at(entry.name)));
    expected += data.at(entry.name);
  }
  auto const records = file.commit();

  auto const written = test::contents_of(folder / "file");
  CHECK(written.substr(written.size() - expected.size()) == expected);
  CHECK((written.size() - expected.size()) % 8 == 0);
  io::safetensors_file const read(folder / "file");
  CHECK(read.metadata().at("about") == "\u00e9\n");
  REQUIRE(records.size() == 7);
  for (std::size_t n = 0; n < records.size(); ++n) {
    auto const& text = data.at(records[n].name);
    CHECK(records[n].name == order[n]);
    CHECK(read.entries()[n].name == order[n]);
    CHECK(written.substr(static_cast<std::size_t>(records[n].offset),
                         static_cast<std::size_t>(records[n].bytes)) == text);
    CHECK(records[n].checksum == io::checksum_of(text));
  }
}

TEST_CASE("a tensor may come in pieces, and empty ones need not come") {
  test::temporary_folder const folder;
  auto const write = [&](std::string const& name, std::size_t step) {
    io::safetensors_writer file(
        folder / name,
        {{"w", io::dtype::f32, {6}}, {"empty", io::dtype::f32, {0}}, {"z", io::dtype::u8, {1}}});
    for (std::size_t at = 0; at < floats.size(); at += step)
      file.write("w", bytes_of(floats).subspan(at, (std::min)(step, floats.size() - at)));
    file.write("z", bytes_of("!"));
    return file.commit();
  };
  auto const whole = write("whole", 24);
  for (std::size_t step : {1u, 5u, 23u}) {
    CHECK(write("pieces", step) == whole);
    CHECK(test::contents_of(folder / "pieces") == test::contents_of(folder / "whole"));
  }
  CHECK(whole.size() == 3);
  CHECK(whole[0].name == "empty");
}

TEST_CASE("a wrong order, too many or too few bytes are errors, and no file appears") {
  test::temporary_folder const folder;
  auto const path = folder / "file";
  {
    io::safetensors_writer file(path, {{"a", io::dtype::u8, {2}}, {"b", io::dtype::u8, {1}}});
    CHECK(
        test::error_of<config_error>([&] { file.write("b", bytes_of("x")); }).says("b was written where a"));
    CHECK(test::error_of<size_error>([&] { file.write("a", bytes_of("xyz")); }).id == "E-io-029");
    file.write("a", bytes_of("x"));
    CHECK(test::error_of<config_error>([&] { file.write("b", bytes_of("x")); }).id == "E-io-028");
    CHECK(test::error_of<size_error>([&] { file.commit(); }).says("a has 1 of its 2 bytes"));
    file.write("a", bytes_of("y"));
    CHECK(test::error_of<size_error>([&] { file.write("a", bytes_of("z")); }).id == "E-io-029");
    file.write("b", bytes_of("z"));
    CHECK(test::error_of<config_error>([&] { file.write("c", bytes_of("x")); }).says("where nothing more"));
  }
  CHECK(io::names_in(folder.path()).empty());
}

TEST_CASE("names that clash or are no UTF-8 and shapes that cannot be are refused") {
  test::temporary_folder const folder;
  auto const open = [&]<class Error>(std::vector<io::tensor_entry> entries, Error) {
    return test::error_of<Error>([&] { io::safetensors_writer(folder / "file", entries); }).id;
  };
  config_error const config("", site::here());
  size_error const size("", site::here());
  CHECK(open({{"a", io::dtype::u8, {2}}, {"a", io::dtype::f32, {1}}}, config) == "E-io-026");
  CHECK(open({{"__metadata__", io::dtype::u8, {2}}}, config) == "E-io-026");
  CHECK(open({{"\xff", io::dtype::u8, {2}}}, config) == "E-io-013");
  CHECK(open({{"a", io::dtype::u8, {-2}}}, size) == "E-io-027");
  CHECK(open({{"a", io::dtype::f4, {3}}}, size) == "E-io-027");
  auto const most = (std::numeric_limits<index_t>::max)() / 8;
  CHECK(open({{"a", io::dtype::u8, {most}}, {"b", io::dtype::u8, {most * 7}}, {"c", io::dtype::u8, {100}}},
             size) == "E-io-027");
  CHECK(io::names_in(folder.path()).empty());
}
