#include <doctest/doctest.h>

#include <support/temporary_folder.hpp>
#include <support/thrown.hpp>

#include <tessera/train/command_line.hpp>

using namespace tessera;

namespace {

std::optional<train::settings> parse(std::vector<char const*> words, std::FILE* help_to = nullptr) {
  words.insert(words.begin(), "train_gpt");
  return train::command_line(static_cast<int>(words.size()), words.data(),
                             {.program = "train_gpt", .purpose = "Trains.", .examples = "\nExamples: none"},
                             help_to);
}

} // namespace

TEST_CASE("every setting is an option, with hyphens for underscores") {
  auto const s = parse({"--data", "book.txt", "--learning-rate", "0.25", "--tied-head", "false", "--layers=7",
                        "--storage", "fp32"});
  REQUIRE(s);
  CHECK(s->data == "book.txt");
  CHECK(s->learning_rate == 0.25);
  CHECK_FALSE(s->tied_head);
  CHECK(s->layers == 7);
  CHECK(s->storage == "fp32");
  CHECK(s->width == train::settings{}.width);
}

TEST_CASE("the command line overrides the config file, which overrides the defaults") {
  test::temporary_folder folder;
  test::put(folder / "c.json", R"({"layers": 5, "heads": 2})");
  auto const path = folder / "c.json";
  auto const s = parse({"--heads", "8", "--config", path.c_str()});
  REQUIRE(s);
  CHECK(s->layers == 5);
  CHECK(s->heads == 8);
  CHECK(s->width == train::settings{}.width);
}

TEST_CASE("differences are allowed by name, more than one") {
  auto const s = parse({"--allow-difference", "data", "--allow-difference", "learning_rate"});
  REQUIRE(s);
  CHECK(s->allow_difference == std::vector<std::string>{"data", "learning_rate"});
}

TEST_CASE("mistakes are errors that name the remedy") {
  auto const unknown = test::error_of<config_error>([] { parse({"--learning-rte", "1"}); });
  CHECK(unknown.id == "E-train-009");
  CHECK(unknown.says("'--learning-rate'"));
  CHECK(test::error_of<config_error>([] { parse({"book.txt"}); }).id == "E-train-009");
  CHECK(test::error_of<config_error>([] { parse({"--layers"}); }).id == "E-train-009");
  CHECK(test::error_of<config_error>([] { parse({"--layers", "two"}); }).id == "E-train-004");
  CHECK(test::error_of<config_error>([] { parse({"--layers", "-2"}); }).id == "E-train-003");
  CHECK(test::error_of<io_error>([] { parse({"--config", "/nowhere.json"}); }).says("/nowhere.json"));
}

TEST_CASE("help lists every setting with its default and meaning, and nothing is run") {
  test::temporary_folder folder;
  auto const path = folder / "help";
  auto* const file = std::fopen(path.c_str(), "w");
  CHECK_FALSE(parse({"--help"}, file));
  std::fclose(file);
  auto const text = test::contents_of(path);
  for (auto const& f : train::fields) {
    CAPTURE(std::string(f.name));
    std::string option = "--" + std::string(f.name);
    for (auto& c : option) c = c == '_' ? '-' : c;
    CHECK(text.find(option) != std::string::npos);
    if (!f.choices.empty()) CHECK(text.find(f.choices) != std::string::npos);
  }
  CHECK(text.find("--config") != std::string::npos);
  CHECK(text.find("Examples: none") != std::string::npos);
  CHECK_FALSE(parse({"--help"})); // a rank that does not speak
}
