#include <doctest/doctest.h>

#include <tessera/data/token_file.hpp>

#include "support/temporary_folder.hpp"
#include "support/thrown.hpp"

using namespace tessera;

namespace {

/// Little-endian bytes, put together without the library.
std::string little_endian(std::uint32_t value, int bytes) {
  std::string text;
  for (int n = 0; n < bytes; ++n) text += static_cast<char>(value >> (8 * n) & 255u);
  return text;
}

std::string shard(std::uint32_t magic, std::uint32_t version, std::uint32_t count,
                  std::string const& tokens) {
  return little_endian(magic, 4) + little_endian(version, 4) + little_endian(count, 4) +
         std::string(253 * 4, '\0') + tokens;
}

std::string tokens_as(int bytes, std::vector<std::uint32_t> const& tokens) {
  std::string text;
  for (auto token : tokens) text += little_endian(token, bytes);
  return text;
}

std::string const narrow_shard = shard(20240520, 1, 3, tokens_as(2, {50256, 0, 464}));
std::string const wide_shard = shard(20240801, 7, 3, tokens_as(4, {128000, 0, 464}));

std::vector<std::uint32_t> all_of(data::token_view tokens) {
  std::vector<std::uint32_t> all;
  for (index_t n = 0; n < tokens.size(); ++n) all.push_back(tokens[n]);
  return all;
}

test::thrown open_error(std::string const& bytes) {
  test::temporary_folder const folder;
  test::put(folder / "bad.bin", bytes);
  auto const error = test::error_of<io_error>([&] { data::token_file file(folder / "bad.bin"); });
  CHECK(error.says("bad.bin"));
  return error;
}

} // namespace

TEST_CASE("shards of both widths are read") {
  test::temporary_folder const folder;
  test::put(folder / "narrow.bin", narrow_shard);
  test::put(folder / "wide.bin", wide_shard);
  data::token_file const narrow(folder / "narrow.bin"), wide(folder / "wide.bin");
  CHECK(narrow.size() == 3);
  CHECK(narrow.tokens().width() == data::token_width::two);
  CHECK(all_of(narrow.tokens()) == std::vector<std::uint32_t>{50256, 0, 464});
  CHECK(wide.tokens().width() == data::token_width::four);
  CHECK(all_of(wide.tokens()) == std::vector<std::uint32_t>{128000, 0, 464});
  test::put(folder / "none.bin", shard(20240520, 1, 0, ""));
  CHECK(data::token_file(folder / "none.bin").size() == 0);
}

TEST_CASE("shards are written byte for byte, whatever the pieces") {
  test::temporary_folder const folder;
  std::vector<std::int32_t> const narrow{50256, 0, 464}, wide{128000, 0, 464};
  for (std::size_t step : {1u, 2u, 3u}) {
    data::token_writer first(folder / "narrow.bin", data::token_width::two);
    data::token_writer second(folder / "wide.bin", data::token_width::four);
    for (std::size_t at = 0; at < 3; at += step) {
      auto const count = (std::min)(step, 3 - at);
      first.append(std::span(narrow).subspan(at, count));
      second.append(std::span(wide).subspan(at, count));
    }
    CHECK(first.size() == 3);
    first.commit();
    second.commit();
    CHECK(test::contents_of(folder / "narrow.bin") == narrow_shard);
    CHECK(test::contents_of(folder / "wide.bin") == wide_shard);
  }
  data::token_writer(folder / "none.bin", data::token_width::two).commit();
  CHECK(test::contents_of(folder / "none.bin") == shard(20240520, 1, 0, ""));
}

TEST_CASE("a large shard comes back") {
  test::temporary_folder const folder;
  std::vector<std::int32_t> tokens(100'003);
  for (std::size_t n = 0; n < tokens.size(); ++n) tokens[n] = static_cast<std::int32_t>(n * 40503 % 65536);
  data::token_writer writer(folder / "large.bin", data::token_width::two);
  writer.append(std::span(tokens).first(99'001));
  writer.append(std::span(tokens).subspan(99'001));
  writer.commit();
  data::token_file const file(folder / "large.bin");
  std::vector<std::int32_t> read(tokens.size());
  file.tokens().copy(0, read, 65536);
  CHECK(read == tokens);
}

TEST_CASE("a token that does not fit is an error that names it, and no file appears") {
  test::temporary_folder const folder;
  {
    data::token_writer writer(folder / "file.bin", data::token_width::two);
    std::vector<std::int32_t> const good{1, 2}, large{3, 65536}, negative{-1};
    writer.append(good);
    auto const error = test::error_of<size_error>([&] { writer.append(large); });
    CHECK(error.id == "E-data-005");
    CHECK(error.says("token 3 is 65536, it must be in [0, 65535]"));
    CHECK(test::error_of<size_error>([&] { writer.append(negative); }).says("token 2 is -1"));
  }
  CHECK(io::names_in(folder.path()).empty());
}

TEST_CASE("every length at which a shard may be cut, and every added byte, is refused") {
  for (auto const& whole : {narrow_shard, wide_shard}) {
    for (std::size_t length = 0; length < whole.size(); ++length) {
      CAPTURE(length);
      REQUIRE(open_error(whole.substr(0, length)).id == (length == 0 ? "E-io-003" : "E-data-004"));
    }
    CHECK(open_error(whole + "x").says("claims 3 tokens"));
    CHECK(open_error(whole + "xy").id == "E-data-004");
  }
}

TEST_CASE("other magic numbers, versions, counts and non-zero headers are refused") {
  auto const body = tokens_as(2, {1, 2, 3});
  CHECK(open_error(shard(20240522, 1, 3, body)).says("begins with 20240522"));
  CHECK(open_error(shard(20240520, 2, 3, body)).says("version 2, known is 1"));
  CHECK(open_error(shard(20240801, 1, 3, tokens_as(4, {1, 2, 3}))).says("version 1, known is 7"));
  CHECK(open_error(shard(20240520, 1, 2, body)).says("claims 2 tokens"));
  CHECK(open_error(shard(20240520, 1, 0xffffffffu, body)).says("claims -1 tokens"));
  CHECK(open_error(shard(20240520, 1, 0x80000003u, body)).id == "E-data-004");
  CHECK(open_error(std::string(2000, 't')).id == "E-data-004");
  for (std::size_t byte = 0; byte < 1024; ++byte) {
    auto altered = narrow_shard;
    altered[byte] = static_cast<char>(altered[byte] ^ 0x40);
    CAPTURE(byte);
    REQUIRE(open_error(altered).id == "E-data-004");
  }
}
