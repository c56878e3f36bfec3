#include <doctest/doctest.h>

#include <algorithm>
#include <cstdlib>

#include <fcntl.h>
#include <sys/ioctl.h>
#include <unistd.h>

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
        "step   7/100  loss 3.2500  left 3m05s  val 3.5000  12.3k tok/s  "
        "lr 1.00e-03  norm 0.50  peak 61%  comm 2%");
}

TEST_CASE("a narrow line holds the first values whole, at every width") {
  auto const whole = train::progress_line(values_at(7));
  for (std::size_t columns = 0; columns <= whole.size() + 1; ++columns) {
    CAPTURE(columns);
    auto const line = train::progress_line(values_at(7), columns);
    CHECK(line.size() <= columns);
    CHECK(whole.starts_with(line));
    // It ends where a value ends: only the number of the step is ever cut.
    if (columns >= 12) CHECK((line == whole || whole.substr(line.size()).starts_with("  ")));
    if (columns >= 37) CHECK(line.find("left 3m05s") != std::string::npos);
  }
  CHECK(train::progress_line(values_at(7), whole.size()) == whole);
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

TEST_CASE("a redrawn line is narrower than the terminal, and a log's line is whole") {
  auto const whole = train::progress_line(values_at(1));
  auto const drawn = [](train::progress_options options) {
    auto const text = printed(options, [](auto& shown) { shown.show(values_at(1)); });
    REQUIRE(text.back() == '\n');
    return text.substr(options.terminal ? 4 : 0,
                       text.size() - (options.terminal ? 5 : 1)); // "\r\x1b[K" first
  };
  CHECK(drawn({.terminal = true, .columns = 200}) == whole);
  CHECK(drawn({.terminal = true, .columns = 30}) == "step   1/100  loss 3.2500");
  CHECK(drawn({.terminal = true, .columns = 26}) == "step   1/100  loss 3.2500");
  CHECK(drawn({.terminal = true, .columns = 25}) == "step   1/100");
  CHECK(drawn({.terminal = true, .columns = 1}).empty());
  CHECK(drawn({.terminal = true}) == train::progress_line(values_at(1), 79)); // a file has no width
  CHECK(drawn({.columns = 30}) == whole);
}

TEST_CASE("the terminal's width is that of the moment") {
  int const ours = ::posix_openpt(O_RDWR | O_NOCTTY);
  if (ours < 0 || ::grantpt(ours) != 0 || ::unlockpt(ours) != 0) {
    MESSAGE("not run: there are no pseudo-terminals");
    return;
  }
  auto* const terminal = std::fopen(::ptsname(ours), "r+");
  REQUIRE(terminal != nullptr);
  {
    train::progress shown(terminal, {.terminal = true});
    for (unsigned short columns : {0, 40, 100, 60}) {
      CAPTURE(columns);
      winsize const size{.ws_row = 24, .ws_col = columns, .ws_xpixel = 0, .ws_ypixel = 0};
      REQUIRE(::ioctl(ours, TIOCSWINSZ, &size) == 0);
      shown.show(values_at(1));
      char text[1000];
      auto const got = ::read(ours, text, sizeof text);
      REQUIRE(got > 0);
      auto const line = train::progress_line(values_at(1), columns == 0 ? 79 : columns - 1u);
      CHECK(std::string(text, static_cast<std::size_t>(got)) == "\r\x1b[K" + line);
    }
  }
  std::fclose(terminal);
  ::close(ours);
}

TEST_CASE("a silent one prints nothing") {
  CHECK(printed({.silent = true}, [](auto& shown) {
          shown.show(values_at(1));
          shown.note("saved");
        }).empty());
}
