#include <doctest/doctest.h>

#include <set>

#include <tessera/train/settings.hpp>

using namespace tessera;
using train::settings;

namespace {

/// The id and message of the config_error that `action` throws.
template <class F>
std::pair<std::string, std::string> failure(F&& action) {
  try {
    action();
  } catch (config_error const& fault) {
    return {fault.id(), fault.what()};
  }
  return {};
}

settings usable() {
  settings s;
  s.data = "text";
  return s;
}

} // namespace

TEST_CASE("every setting has one row with a help text, and its name is unique") {
  std::set<std::string_view> names;
  for (auto const& f : train::fields) {
    CHECK(names.insert(f.name).second);
    CHECK(f.help.size() > 10);
    CHECK(f.name.find_first_not_of("abcdefghijklmnopqrstuvwxyz0123456789_") == std::string_view::npos);
  }
}

TEST_CASE("the defaults are allowed values and fit each other") {
  CHECK_NOTHROW(train::check(usable()));
}

TEST_CASE("a setting's text reads back to the same value") {
  auto const before = usable();
  settings after;
  after.layers = 99;
  after.learning_rate = 0.123456789012345;
  after.tied_head = false;
  for (auto const& f : train::fields) train::set(after, f.name, train::value_text(before, f));
  for (auto const& f : train::fields) CHECK(train::value_text(before, f) == train::value_text(after, f));
  train::set(after, "learning_rate", "0.1");
  CHECK(after.learning_rate == 0.1);
}

TEST_CASE("an unknown name is an error that names the nearest") {
  auto const [id, text] = failure([] {
    settings s;
    train::set(s, "learnin_rate", "1");
  });
  CHECK(id == "E-train-001");
  CHECK(text.find("'learning_rate'") != std::string::npos);
}

TEST_CASE("a value that a setting cannot take is an error that says what it can take") {
  struct {
    char const *name, *value, *id, *word;
  } const cases[] = {
      {"layers", "2.5", "E-train-004", "whole number"},
      {"layers", "", "E-train-004", "whole number"},
      {"layers", "0", "E-train-003", "[1"},
      {"layers", "-3", "E-train-003", "[1"},
      {"layers", "99999999999999999999", "E-train-004", "whole number"},
      {"learning_rate", "fast", "E-train-004", "a number"},
      {"learning_rate", "nan", "E-train-003", "must lie in"},
      {"learning_rate", "inf", "E-train-003", "must lie in"},
      {"learning_rate", "-0.1", "E-train-003", "must lie in"},
      {"tied_head", "yes", "E-train-004", "true or false"},
      {"family", "bert", "E-train-002", "gpt2|llama"},
      {"family", "gpt2|llama", "E-train-002", "gpt2|llama"},
      {"storage", "fp8", "E-train-002", "fp32|bf16"},
      {"zero_stage", "4", "E-train-003", "[0"},
      {"tensor", "0", "E-train-003", "[1"},
      {"pipeline_schedule", "2f2b", "E-train-002", "1f1b|gpipe"},
      {"validation_share", "0.6", "E-train-003", "0.5"},
  };
  for (auto const& c : cases) {
    CAPTURE(std::string(c.name));
    CAPTURE(std::string(c.value));
    auto const [id, text] = failure([&] {
      settings s;
      train::set(s, c.name, c.value);
    });
    CHECK(id == c.id);
    CHECK(text.find(c.word) != std::string::npos);
    CHECK(text.find(c.name) != std::string::npos);
  }
}

TEST_CASE("settings that do not fit each other are errors that say how to fix them") {
  struct {
    char const *names[3], *values[3], *id, *word;
  } const cases[] = {
      {{"data"}, {""}, "E-train-005", "--data"},
      {{"run"}, {""}, "E-train-005", "--run"},
      {{"width", "heads"}, {"100", "8"}, "E-train-006", "104"},
      {{"family", "width", "heads"}, {"llama", "12", "4"}, "E-train-006", "16"},
      {{"key_value_heads"}, {"2"}, "E-train-007", "llama"},
      {{"family", "key_value_heads"}, {"llama", "3"}, "E-train-006", "divisor"},
      {{"rotary_theta"}, {"500000"}, "E-train-007", "llama"},
      {{"schedule", "final_rate_share"}, {"constant", "0.5"}, "E-train-007", "another schedule"},
      {{"vocabulary"}, {"1000"}, "E-train-007", "sentencepiece"},
      {{"tokenizer"}, {"tokens"}, "E-train-007", "set vocabulary"},
      {{"device", "threads"}, {"cuda", "2"}, "E-train-007", "device host"},
      {{"steps"}, {"10"}, "E-train-008", "warm_up_steps"},
      {{"decay_steps"}, {"10"}, "E-train-007", "warm_up_stable_decay"},
      {{"schedule", "decay_steps"}, {"warm_up_stable_decay", "990"}, "E-train-008", "decay_steps"},
  };
  for (auto const& c : cases) {
    CAPTURE(std::string(c.word));
    auto s = usable();
    for (int i = 0; i < 3 && c.names[i] != nullptr; ++i) train::set(s, c.names[i], c.values[i]);
    auto const [id, text] = failure([&] { train::check(s); });
    CHECK(id == c.id);
    CHECK(text.find(c.word) != std::string::npos);
  }
}
