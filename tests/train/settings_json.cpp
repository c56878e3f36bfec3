#include <doctest/doctest.h>

#include <tessera/train/settings_json.hpp>

using namespace tessera;
using train::settings_of;

namespace {

std::string failure(char const* text) {
  try {
    settings_of(io::parse_json(text, "test"), "test");
  } catch (config_error const& fault) {
    return fault.what();
  }
  return {};
}

} // namespace

TEST_CASE("settings written as JSON read back the same") {
  train::settings s;
  s.data = "a \"quoted\" path";
  s.learning_rate = 0.1 + 0.2;
  s.layers = 7;
  s.tied_head = false;
  auto const text = io::text_of_json(train::json_of(s));
  auto const again = settings_of(io::parse_json(text, "again"), "again");
  for (auto const& f : train::fields) CHECK(train::value_text(s, f) == train::value_text(again, f));
}

TEST_CASE("keys that are left out keep their defaults") {
  auto const s = settings_of(io::parse_json(R"({"layers": 9})", "test"), "test");
  CHECK(s.layers == 9);
  CHECK(s.width == train::settings{}.width);
}

TEST_CASE("unknown keys, wrong types and impossible values are errors that name the key") {
  CHECK(failure(R"({"learning_rte": 1})").find("learning_rate") != std::string::npos);
  CHECK(failure(R"({"layers": "9"})").find("layers") != std::string::npos);
  CHECK(failure(R"({"layers": 9.5})").find("layers") != std::string::npos);
  CHECK(failure(R"({"layers": 0})").find("layers") != std::string::npos);
  CHECK(failure(R"({"tied_head": 1})").find("tied_head") != std::string::npos);
  CHECK(failure(R"({"family": "bert"})").find("gpt2|llama") != std::string::npos);
  CHECK(failure(R"([1])").find("object") != std::string::npos);
  CHECK(failure(R"({"width": 9223372036854775808})").find("width") != std::string::npos);
}
