#include <doctest/doctest.h>

#include <algorithm>

#include <tessera/train/progress.hpp>

using namespace tessera;

namespace {

train::progress_values values_at(index_t step) {
  return {.step = step,
          .steps = 100,
          .loss = 3.25,
          .validation_loss = 3.5,
          .learning_rate = 1e-3,
          .gradient_norm = 0.5,
          .tokens_per_second = 12345,
          .peak_share = 0.61,
          .communication_share = 0.02,
          .seconds_left = 185};
}

/// What `action` prints through a progress of these options.
template <class F>
std::string printed(train::progress_options options, F&& action) {
  auto* const file = std::tmpfile();
  {
    train::progress shown(file, options);
    action(shown);
  }
  std::rewind(file);
  std::string text;
  for (int c; (c = std::fgetc(file)) != EOF;) text += static_cast<char>(c);
  std::fclose(file);
  return text;
}

} // namespace

TEST_CASE("the line holds all that a watcher asks for") {
  CHECK(train::progress_line(values_at(7)) ==
        "step   7/100  loss 3.2500  val 3.5000  lr 1.00e-03  norm 0.50  "
        "12.3k tok/s  peak 61%  comm 2%  left 3m05s");
}

TEST_CASE("what was not measured is left out") {
  auto v = values_at(7);
  v.validation_loss = -1;
  v.peak_share = 0;
  CHECK(train::progress_line(v).find("val") == std::string::npos);
  CHECK(train::progress_line(v).find("peak") == std::string::npos);
}

TEST_CASE("durations and rates are short at every magnitude") {
  CHECK(train::duration_text(0) == "0s");
  CHECK(train::duration_text(59.4) == "59s");
  CHECK(train::duration_text(7800) == "2h10m");
  CHECK(train::duration_text(3 * 86400 + 4 * 3600) == "3d04h");
  CHECK(train::duration_text(-1) == "?");
  CHECK(train::duration_text(1e300) == "?");
  CHECK(train::rate_text(0) == "0");
  CHECK(train::rate_text(999) == "999");
  CHECK(train::rate_text(1.25e6) == "1.2M");
}

TEST_CASE("a log gets whole lines: the first, every so many, and the last") {
  auto const text = printed({.every = 50}, [](auto& shown) {
    for (index_t step = 3; step <= 100; ++step) shown.show(values_at(step));
  });
  CHECK(std::count(text.begin(), text.end(), '\n') == 3);
  CHECK(text.find("step   3/100") == 0);
  CHECK(text.find("step  50/100") != std::string::npos);
  CHECK(text.find("step 100/100") != std::string::npos);
  CHECK(text.find('\r') == std::string::npos);
}

TEST_CASE("a terminal has one line redrawn, notes stand above it, and the last line stays") {
  auto const text = printed({.terminal = true}, [](auto& shown) {
    shown.show(values_at(1));
    shown.show(values_at(2));
    shown.note("saved");
    shown.show(values_at(3));
  });
  CHECK(std::count(text.begin(), text.end(), '\n') == 2);
  CHECK(text.find("\r\x1b[Ksaved\n") != std::string::npos);
  CHECK(text.back() == '\n');
}

TEST_CASE("a silent one prints nothing") {
  CHECK(printed({.silent = true}, [](auto& shown) {
          shown.show(values_at(1));
          shown.note("saved");
        }).empty());
}
