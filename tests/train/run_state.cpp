#include <doctest/doctest.h>

#include <support/thrown.hpp>

#include <tessera/train/run_state.hpp>

using namespace tessera;
using train::run_state;

namespace {

run_state example() {
  run_state s;
  s.step = 12;
  s.position = 192;
  s.chosen.data = "text";
  s.data = "0123456789abcdef";
  s.vocabulary = 256;
  s.layout = "data 2, zero 1";
  s.arithmetic = "oneDNN products, 2 threads";
  return s;
}

std::string refusal(run_state const& current, std::vector<std::string> const& allowed = {}) {
  try {
    train::require_same(example(), current, allowed, "run/step-00000012");
  } catch (config_error const& fault) {
    return fault.what();
  }
  return {};
}

} // namespace

TEST_CASE("a state written as JSON reads back the same") {
  auto const again = train::run_state_of(train::json_of(example()), "test");
  CHECK(train::json_of(again) == train::json_of(example()));
  CHECK(train::differences(example(), again).empty());
}

TEST_CASE("what is not a state is an io_error that names the file") {
  for (auto const* text : {"[]", "{}", R"({"format": "tessera run 1"})", R"({"format": "tessera run 3"})"}) {
    try {
      train::run_state_of(io::parse_json(text, "x"), "run/state.json");
      FAIL(text);
    } catch (io_error const& fault) {
      CHECK(std::string(fault.id()) == "E-train-050");
      CHECK(std::string(fault.what()).find("run/state.json") != std::string::npos);
    }
  }
}

TEST_CASE("what decides the numbers is refused by name, what does not is free") {
  auto const same = example();
  for (auto const& f : train::fields) {
    CAPTURE(std::string(f.name));
    auto other = same;
    std::visit(
        [&](auto member) {
          auto& value = other.chosen.*member;
          if constexpr (std::same_as<decltype(value), std::string&>)
            value += "x";
          else if constexpr (std::same_as<decltype(value), bool&>)
            value = !value;
          else
            value += 1;
        },
        f.member);
    auto const text = refusal(other);
    CHECK(text.empty() == (f.bound != train::binding::refused));
    if (!text.empty()) {
      CHECK(text.find("--allow-difference " + std::string(f.name)) != std::string::npos);
      CHECK(refusal(other, {std::string(f.name)}).empty());
    }
  }
}

TEST_CASE("other data and another layout are refused, and all differences are listed at once") {
  auto other = example();
  other.data = "fedcba9876543210";
  other.layout = "data 3, zero 1";
  other.arithmetic = "oneDNN products, 3 threads";
  other.chosen.learning_rate = 0.5;
  auto const text = refusal(other);
  CHECK(text.find("data: 0123456789abcdef there, fedcba9876543210 here") != std::string::npos);
  CHECK(text.find("layout: data 2, zero 1 there, data 3, zero 1 here") != std::string::npos);
  CHECK(text.find("learning_rate: 0.001 there, 0.5 here") != std::string::npos);
  CHECK(text.find("arithmetic: oneDNN products, 2 threads there, oneDNN products, 3 threads here") !=
        std::string::npos);
  auto const rest = refusal(other, {"data", "layout", "arithmetic"});
  CHECK(rest.find("layout:") == std::string::npos);
  CHECK(rest.find("learning_rate") != std::string::npos);
  CHECK(refusal(other, {"data", "layout", "arithmetic", "learning_rate"}).empty());
  other.chosen.device = "cuda"; // whose arithmetic is another
  CHECK(refusal(other, {"data", "layout", "learning_rate"}).find("arithmetic") == std::string::npos);
}

TEST_CASE("an allowed difference that does not exist is an error") {
  CHECK(test::error_of<config_error>([] {
          train::check_allowed({"data", "learningrate"});
        }).says("learning_rate"));
  train::check_allowed({"data", "optimizer", "arithmetic", "layout", "learning_rate"});
}
