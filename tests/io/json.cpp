// requires: json
#include <doctest/doctest.h>

#include <cstdint>

#include <tessera/io/json.hpp>

#include "support/temporary_folder.hpp"
#include "support/thrown.hpp"

using namespace tessera;

namespace {

test::thrown parse_error(std::string const& text) {
  return test::error_of<io_error>([&] { io::parse_json(text, "the text"); });
}

io::json const example = io::parse_json(R"({"width": 64, "rate": 3e-4, "tied": true, "name": "first",
    "sizes": [1, 2, 3], "optimizer": {"beta1": 0.9}, "negative": -1, "large": 18446744073709551615,
    "fraction": 1.5, "huge": 1e300})",
                                        "example");

template <class T>
test::thrown read_error(std::string const& key) {
  io::json_reader read(example, "run.json");
  return test::error_of<config_error>([&] { read.required<T>(key); });
}

} // namespace

TEST_CASE("a reader gives what stands there, in the type that is asked for") {
  io::json_reader read(example, "run.json");
  CHECK(read.required<index_t>("width") == 64);
  CHECK(read.required<std::uint8_t>("width") == 64);
  CHECK(read.required<double>("width") == 64.0);
  CHECK(read.required<float>("rate") == 3e-4f);
  CHECK(read.required<bool>("tied"));
  CHECK(read.required<std::string>("name") == "first");
  CHECK(read.required<std::vector<int>>("sizes") == std::vector<int>{1, 2, 3});
  CHECK(read.required<std::uint64_t>("large") == ~std::uint64_t{0});
  CHECK(read.required<int>("negative") == -1);
  CHECK(read.optional<int>("missing", 5) == 5);
  CHECK(read.optional<int>("width", 5) == 64);
  CHECK(read.choice("name", {"zeroth", "first"}, 0) == 1);
  CHECK(read.choice("missing", {"zeroth", "first"}, 1) == 1);
  CHECK(read.section("optimizer").required<float>("beta1") == 0.9f);
}

TEST_CASE("a key that nobody asked for is an error that names the nearest known one") {
  io::json const object{{"widht", 64}};
  io::json_reader read(object, "run.json");
  read.optional<int>("depth", 1);
  read.optional<int>("width", 1);
  auto const error = test::error_of<config_error>([&] { read.finish(); });
  CHECK(error.id == "E-io-016");
  CHECK(error.says("run.json: unknown key \"widht\"; did you mean \"width\"?"));

  io::json_reader none(object, "run.json");
  CHECK(test::error_of<config_error>([&] { none.finish(); }).says("unknown key \"widht\" ["));
}

TEST_CASE("an object whose keys were all asked for is accepted") {
  io::json const object{{"width", 64}, {"depth", 2}};
  io::json_reader read(object, "run.json");
  read.required<int>("width");
  CHECK(read.has("depth"));
  read.finish();
}

TEST_CASE("a missing key is an error that names the key it may have been mistaken for") {
  io::json const object{{"optimizer", {{"beta", 1}}}};
  io::json_reader read(object, "run.json");
  CHECK(test::error_of<config_error>([&] { read.section("schedule"); }).id == "E-io-015");
  auto inner = read.section("optimizer");
  auto const error = test::error_of<config_error>([&] { inner.required<float>("beta1"); });
  CHECK(error.id == "E-io-015");
  CHECK(error.says("run.json: optimizer lacks the key \"beta1\"; it has \"beta\""));
}

TEST_CASE("values of another type, or out of range, are errors that show what came") {
  CHECK(read_error<index_t>("fraction").says("fraction must be an integer from"));
  CHECK(read_error<index_t>("fraction").says("it is 1.5"));
  CHECK(read_error<index_t>("large").id == "E-io-017");
  CHECK(read_error<std::uint64_t>("negative").id == "E-io-017");
  CHECK(read_error<std::int8_t>("huge").id == "E-io-017");
  CHECK(read_error<index_t>("tied").id == "E-io-017");
  CHECK(read_error<index_t>("name").says("it is \"first\""));
  CHECK(read_error<float>("huge").id == "E-io-017");
  CHECK(read_error<float>("tied").id == "E-io-017");
  CHECK(read_error<bool>("width").id == "E-io-017");
  CHECK(read_error<std::string>("width").id == "E-io-017");
  CHECK(read_error<std::vector<int>>("width").id == "E-io-017");
  CHECK(read_error<std::vector<bool>>("sizes").says("sizes[0] must be true or false"));
  CHECK(read_error<int>("optimizer").says("it is an object"));
  io::json_reader read(example, "run.json");
  CHECK(test::error_of<config_error>([&] { read.section("width"); }).id == "E-io-014");
  CHECK(test::error_of<config_error>([&] { read.choice("name", {"a", "b"}, 0); }).says("it can be: a, b"));
}

TEST_CASE("what is not JSON is refused with its place") {
  CHECK(parse_error("").id == "E-io-011");
  CHECK(parse_error("{\"a\": 1").says("the text is not JSON"));
  CHECK(parse_error("{\"a\": 1,\n \"b\": }").says("line 2"));
  CHECK(parse_error("{} {}").id == "E-io-011");
  CHECK(parse_error("{\"a\": 1 /* no */}").id == "E-io-011");
  CHECK(parse_error("{\"a\": NaN}").id == "E-io-011");
  CHECK(parse_error("\xEF\xBB\xBF{}").id == "E-io-011");
  CHECK(parse_error(std::string("{}\0{", 4)).id == "E-io-011");
  CHECK(parse_error("{\"a\": \"\xff\"}").id == "E-io-011");
}

TEST_CASE("a key that stands twice in one object is refused, in two objects it is not") {
  CHECK(parse_error(R"({"a": 1, "b": 2, "a": 3})").id == "E-io-012");
  CHECK(parse_error(R"({"a": 1, "b": {"c": 1, "c": 1}})").says("\"c\""));
  CHECK(parse_error(R"([{"a": 1}, {"a": {"a": 1}}])").id == "nothing was thrown");
}

TEST_CASE("nesting of any depth neither overflows nor is written out in a message") {
  std::string deep = "{\"a\": ";
  for (int n = 0; n < 200'000; ++n) deep += '[';
  for (int n = 0; n < 200'000; ++n) deep += ']';
  auto const value = io::parse_json(deep + "}", "deep");
  io::json_reader read(value, "deep");
  CHECK(test::error_of<config_error>([&] { read.required<int>("a"); }).says("it is a list"));
}

TEST_CASE("what is written reads back equal, in the same order and the same bytes") {
  test::temporary_folder const folder;
  io::json const value{{"z", 1.0 / 3}, {"a", 3e-4f}, {"list", {1, -2, 1e300}}, {"text", "\"\n\u00e9"}};
  io::write_json(folder / "value.json", value);
  CHECK(io::read_json(folder / "value.json") == value);
  CHECK(io::text_of_json(io::read_json(folder / "value.json")) == test::contents_of(folder / "value.json"));
  CHECK(test::contents_of(folder / "value.json").find("\"z\"") == 4);
  CHECK(test::error_of<config_error>([] { io::text_of_json("\xff"); }).id == "E-io-013");
  CHECK(test::error_of<io_error>([&] { io::read_json(folder / "missing.json"); }).id == "E-io-001");
}

TEST_CASE("edit distances are those of Levenshtein's examples") {
  CHECK(io::detail::edit_distance("kitten", "sitting") == 3);
  CHECK(io::detail::edit_distance("", "abc") == 3);
  CHECK(io::detail::edit_distance("abc", "") == 3);
  CHECK(io::detail::edit_distance("flaw", "lawn") == 2);
  CHECK(io::detail::edit_distance("same", "same") == 0);
  CHECK(io::detail::nearest("layer", {}).empty());
}
