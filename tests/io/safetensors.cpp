// requires: json
#include <doctest/doctest.h>

#include <tessera/io/safetensors.hpp>

#include "support/temporary_folder.hpp"
#include "support/thrown.hpp"

using namespace tessera;

namespace {

/// The eight bytes of a header's length.
std::string length_bytes(std::uint64_t length) {
  std::string bytes(8, '\0');
  for (std::size_t n = 0; n < 8; ++n) bytes[n] = static_cast<char>(length >> (8 * n) & 255u);
  return bytes;
}

std::string file_of(std::string const& header, std::string const& data) {
  return length_bytes(header.size()) + header + data;
}

/// Two tensors, put together by hand: b (F32 [3] = 0, 1, 2) stands before a (U8 [2] = 7, 8).
std::string const two_tensors =
    file_of(R"({"a":{"dtype":"U8","shape":[2],"data_offsets":[12,14]},)"
            R"("b":{"dtype":"F32","shape":[3],"data_offsets":[0,12]},"__metadata__":{"format":"pt"}})",
            std::string("\0\0\0\0\0\0\x80\x3f\0\0\0\x40\7\x8", 14));

test::thrown open_error(std::string const& bytes) {
  test::temporary_folder const folder;
  test::put(folder / "bad.safetensors", bytes);
  auto const error = test::error_of<io_error>([&] { io::safetensors_file file(folder / "bad.safetensors"); });
  if (error.id == "E-io-020") CHECK(error.says(folder / "bad.safetensors"));
  return error;
}

void check_refused(std::string const& bytes, std::string const& reason) {
  auto const error = open_error(bytes);
  CAPTURE(error.message);
  CAPTURE(reason);
  CHECK(error.id == "E-io-020");
  CHECK(error.says(reason));
}

std::string one(std::string const& entry, std::string const& data) {
  return file_of("{\"t\":" + entry + "}", data);
}

} // namespace

TEST_CASE("a file is read: names, types, shapes, metadata and bytes") {
  test::temporary_folder const folder;
  test::put(folder / "two.safetensors", two_tensors);
  io::safetensors_file const file(folder / "two.safetensors");
  REQUIRE(file.entries().size() == 2);
  CHECK(file.entries()[0].name == "b");
  CHECK(file.entries()[0].shape == std::vector<index_t>{3});
  CHECK(file.entries()[1].name == "a");
  CHECK(file.entries()[1].type == io::dtype::u8);
  CHECK(file.metadata() == std::map<std::string, std::string>{{"format", "pt"}});
  float b[3] = {};
  file.read<float>("b", b);
  CHECK(b[0] == 0.0f);
  CHECK(b[1] == 1.0f);
  CHECK(b[2] == 2.0f);
  float part[1] = {};
  file.read_part<float>("b", 2, part);
  CHECK(part[0] == 2.0f);
  file.read_part<float>("b", 3, std::span<float>());
  std::uint8_t a[2] = {};
  file.read<std::uint8_t>("a", a);
  CHECK(a[1] == 8);
  CHECK(file.bytes(file.at("a")).size() == 2);
  CHECK(file.find("c") == nullptr);
}

TEST_CASE("asking for a wrong name, type or size is an error that names the tensor") {
  test::temporary_folder const folder;
  test::put(folder / "two.safetensors", two_tensors);
  io::safetensors_file const file(folder / "two.safetensors");
  float three[3], two[2], four[4];
  CHECK(test::error_of<io_error>([&] { file.read<float>("c", three); }).id == "E-io-023");
  CHECK(test::error_of<io_error>([&] { file.read<float>("a", two); }).says("tensor a is of type U8, F32"));
  CHECK(test::error_of<size_error>([&] { file.read<float>("b", two); }).id == "E-io-025");
  CHECK(test::error_of<size_error>([&] { file.read<float>("b", four); }).id == "E-io-025");
  CHECK(test::error_of<size_error>([&] { file.read_part<float>("b", 2, two); }).id == "E-io-025");
  CHECK(test::error_of<size_error>([&] { file.read_part<float>("b", -1, two); }).id == "E-io-025");
}

TEST_CASE("the format's own examples are read") {
  test::temporary_folder const folder;
  auto const entries_of = [&](std::string const& bytes) {
    test::put(folder / "file", bytes);
    return io::safetensors_file(folder / "file").entries();
  };
  std::string floats;
  for (int n = 0; n < 6; ++n) {
    auto const value = static_cast<float>(n);
    floats.append(reinterpret_cast<char const*>(&value), 4);
  }
  std::string const header = R"({"attn.0":{"dtype":"F32","shape":[1,2,3],"data_offsets":[0,24]}})";
  CHECK(header.size() == 64);
  CHECK(entries_of(file_of(header, floats))[0].shape == std::vector<index_t>{1, 2, 3});
  CHECK(entries_of(file_of(R"({"attn0":{"dtype":"F32","shape":[1,1,2,3],"data_offsets":[0,24]}})"
                           "       ",
                           floats))
            .size() == 1);
  CHECK(entries_of(file_of("{}      ", "")).empty());
  CHECK(entries_of(one(R"({"dtype":"F4","shape":[1,2],"data_offsets":[0,1]})", "x")).size() == 1);
  CHECK(entries_of(one(R"({"dtype":"F32","shape":[],"data_offsets":[0,4]})", "abcd"))[0].elements() == 1);
  CHECK(entries_of(one(R"({"dtype":"F32","shape":[2,0],"data_offsets":[0,0]})", ""))[0].elements() == 0);
  CHECK(entries_of(file_of("  \n{\"__metadata__\":{}}\t\r\n ", "")).empty());
}

TEST_CASE("every length at which a file may be cut, and every added byte, is refused") {
  for (std::size_t length = 0; length < two_tensors.size(); ++length) {
    auto const error = open_error(two_tensors.substr(0, length));
    CAPTURE(length);
    REQUIRE(error.id == (length == 0 ? "E-io-003" : "E-io-020"));
  }
  check_refused(two_tensors + "x", "its tensors take 14 bytes, it has 15");
  check_refused(two_tensors.substr(0, two_tensors.size() - 2), "it was cut");
}

TEST_CASE("a header that lies about its length is refused") {
  check_refused("1234567", "fewer than the 8");
  check_refused(length_bytes(100'000'001) + std::string(100, ' '), "at most 100000000 are allowed");
  check_refused(length_bytes(~std::uint64_t{0}) + "{}", "at most 100000000");
  check_refused(length_bytes(99'999'999) + "{}", "the file has 2 after its length");
  check_refused(length_bytes(3) + "{}", "the file has 2 after its length");
}

TEST_CASE("a header that is not the JSON of the format is refused") {
  CHECK(open_error(file_of("", "")).id == "E-io-011");
  CHECK(open_error(file_of("{", "")).id == "E-io-011");
  CHECK(open_error(file_of(std::string("{}\0\0", 4), "")).id == "E-io-011");
  CHECK(open_error(file_of("{\"\xff\":1}", "")).id == "E-io-011");
  CHECK(open_error(file_of(R"({"t":{"dtype":"U8","shape":[1],"data_offsets":[0,1]},)"
                           R"("t":{"dtype":"U8","shape":[1],"data_offsets":[0,1]}})",
                           "x"))
            .id == "E-io-012");
  check_refused(file_of("[]", ""), "not a JSON object");
  check_refused(file_of("3", ""), "not a JSON object");
  check_refused(file_of(R"({"t":3})", ""), "not described by dtype");
  check_refused(file_of(R"({"__metadata__":3})", ""), "not an object");
  check_refused(file_of(R"({"__metadata__":{"a":3}})", ""), "not a string");
  check_refused(one(R"({"dtype":"U8","shape":[1]})", "x"), "not described by");
  check_refused(one(R"({"dtype":"U8","shape":[1],"data_offsets":[0,1],"more":1})", "x"), "not described by");
  check_refused(one(R"({"dtype":"U9","shape":[1],"data_offsets":[0,1]})", "x"), "unknown dtype \"U9\"");
  check_refused(one(R"({"dtype":8,"shape":[1],"data_offsets":[0,1]})", "x"), "unknown dtype 8");
  check_refused(one(R"({"dtype":"U8","shape":1,"data_offsets":[0,1]})", "x"), "must be a list");
  check_refused(one(R"({"dtype":"U8","shape":[1],"data_offsets":[0,1,2]})", "x"), "must be a list");
  check_refused(one(R"({"dtype":"U8","shape":[-1],"data_offsets":[0,1]})", "x"), "is not a size");
  check_refused(one(R"({"dtype":"U8","shape":[1.0],"data_offsets":[0,1]})", "x"), "is not a size");
  check_refused(one(R"({"dtype":"U8","shape":["1"],"data_offsets":[0,1]})", "x"), "is not a size");
  check_refused(one(R"({"dtype":"U8","shape":[[1]],"data_offsets":[0,1]})", "x"), "a list is not a size");
  check_refused(one(R"({"dtype":"U8","shape":[1],"data_offsets":[0,1e0]})", "x"), "is not a size");
}

TEST_CASE("shapes and offsets that overflow, overlap, leave holes or do not agree are refused") {
  check_refused(
      one(R"({"dtype":"I32","shape":[2,18446744073709551614],"data_offsets":[0,16]})", std::string(16, 'x')),
      "is not a size");
  check_refused(
      one(R"({"dtype":"I32","shape":[2,9223372036854775807],"data_offsets":[0,16]})", std::string(16, 'x')),
      "overflows");
  check_refused(
      one(R"({"dtype":"I32","shape":[1152921504606846976,2],"data_offsets":[0,16]})", std::string(16, 'x')),
      "overflows");
  check_refused(one(R"({"dtype":"I32","shape":[2,2],"data_offsets":[0,4]})", "abcd"), "takes 16 bytes");
  check_refused(one(R"({"dtype":"F4","shape":[1,3],"data_offsets":[0,2]})", "ab"), "whole bytes");
  check_refused(one(R"({"dtype":"U8","shape":[1],"data_offsets":[1,0]})", "x"), "its offsets are [1, 0)");
  check_refused(one(R"({"dtype":"U8","shape":[1],"data_offsets":[1,2]})", "xy"), "begins at byte 1");
  check_refused(one(R"({"dtype":"U8","shape":[2],"data_offsets":[0,18446744073709551615]})", "xy"),
                "not a size");

  std::string ten = "{";
  for (int n = 0; n < 10; ++n)
    ten +=
        (n ? ",\"" : "\"") + std::to_string(n) + R"(":{"dtype":"F32","shape":[2,2],"data_offsets":[0,16]})";
  check_refused(file_of(ten + "}", std::string(16, 'x')), "the one before it ends at 16");

  auto const pair = [](std::string const& first, std::string const& second) {
    return file_of(R"({"s":{"dtype":"U8","shape":[2],"data_offsets":)" + first +
                       R"(},"t":{"dtype":"U8","shape":[2],"data_offsets":)" + second + "}}",
                   "abcde");
  };
  check_refused(pair("[0,2]", "[1,3]"), "tensor t begins at byte 1");
  check_refused(pair("[0,2]", "[3,5]"), "tensor t begins at byte 3");
  check_refused(pair("[0,2]", "[2,4]"), "its tensors take 4 bytes, it has 5");
}

TEST_CASE("a flipped bit is refused or leaves a file that describes exactly its data") {
  test::temporary_folder const folder;
  int refused = 0, accepted = 0;
  for (std::size_t bit = 0; bit < (two_tensors.size() - 14) * 8; ++bit) {
    auto altered = two_tensors;
    altered[bit / 8] = static_cast<char>(altered[bit / 8] ^ (1 << bit % 8));
    test::put(folder / "file", altered);
    try {
      io::safetensors_file const file(folder / "file");
      index_t bytes = 0;
      for (auto const& entry : file.entries()) bytes += static_cast<index_t>(file.bytes(entry).size());
      REQUIRE(bytes == 14);
      ++accepted; // a letter of a name, a type of the same width
    } catch (io_error const&) {
      ++refused;
    }
  }
  CHECK(refused > 6 * accepted);
}
