/// One line about where a run stands, what matters most first. On a terminal the line is redrawn in place,
/// cut to the terminal's width; in a log each line stands by itself, whole, every so many steps.
///
///     progress shown(stderr, {.terminal = isatty(2), .every = 10});
///     shown.show({.step = 20, .steps = 100, .loss = 3.2, ...});
///     shown.note("checkpoint run/step-00000020");        // a line of its own, above the progress line
#ifndef TESSERA_TRAIN_PROGRESS_HPP
#define TESSERA_TRAIN_PROGRESS_HPP

#include <cmath>
#include <cstdio>
#include <cstring>
#include <string>
#include <string_view>

#include <sys/ioctl.h>

#include <tessera/core/extents.hpp>

namespace tessera::inline TESSERA_ABI::train {

struct progress_values {
  index_t step = 0;
  index_t steps = 0;
  double loss = 0;             ///< Of this step, in nats per token.
  double validation_loss = -1; ///< The latest; negative: none yet.
  double learning_rate = 0;
  double gradient_norm = 0;       ///< Before clipping.
  double tokens_per_second = 0;   ///< Over all ranks.
  double peak_share = 0;          ///< Of the measured matrix peak of all ranks; 0: not measured.
  double communication_share = 0; ///< Of the step's time, spent waiting in collectives.
  double seconds_left = 0;
};

/// "45s", "3m05s", "2h10m", "3d04h".
inline std::string duration_text(double seconds) {
  if (!(seconds >= 0) || seconds > 1e9) return "?";
  auto const total = std::lround(seconds);
  char text[32];
  if (total < 60)
    std::snprintf(text, sizeof text, "%lds", total);
  else if (total < 3600)
    std::snprintf(text, sizeof text, "%ldm%02lds", total / 60, total % 60);
  else if (total < 86400)
    std::snprintf(text, sizeof text, "%ldh%02ldm", total / 3600, total / 60 % 60);
  else
    std::snprintf(text, sizeof text, "%ldd%02ldh", total / 86400, total / 3600 % 24);
  return text;
}

/// "954", "9.5k", "12.3k", "1.2M".
inline std::string rate_text(double value) {
  char text[32];
  if (value < 1000)
    std::snprintf(text, sizeof text, "%.0f", value);
  else if (value < 1e6)
    std::snprintf(text, sizeof text, "%.1fk", value / 1e3);
  else
    std::snprintf(text, sizeof text, "%.1fM", value / 1e6);
  return text;
}

/// The values that fit into `columns`, in the order of their weight: none stands there by half. All of it is
/// ASCII, a byte a column.
inline std::string progress_line(progress_values const& v, std::size_t columns = std::string::npos) {
  auto const steps = std::to_string(v.steps);
  char text[256];
  std::snprintf(text, sizeof text, "step %*lld/%s", narrow<int>(steps.size()), static_cast<long long>(v.step),
                steps.c_str());
  auto line = std::string(text).substr(0, columns);
  auto full = false;
  auto const add = [&] { // what is in `text`, if all before it fitted
    full = full || line.size() + std::strlen(text) > columns;
    if (!full) line += text;
  };
  std::snprintf(text, sizeof text, "  loss %.4f", v.loss);
  add();
  std::snprintf(text, sizeof text, "  left %s", duration_text(v.seconds_left).c_str());
  add();
  if (v.validation_loss >= 0) {
    std::snprintf(text, sizeof text, "  val %.4f", v.validation_loss);
    add();
  }
  std::snprintf(text, sizeof text, "  %s tok/s", rate_text(v.tokens_per_second).c_str());
  add();
  std::snprintf(text, sizeof text, "  lr %.2e", v.learning_rate);
  add();
  std::snprintf(text, sizeof text, "  norm %.2f", v.gradient_norm);
  add();
  if (v.peak_share > 0) {
    std::snprintf(text, sizeof text, "  peak %.0f%%", 100 * v.peak_share);
    add();
  }
  std::snprintf(text, sizeof text, "  comm %.0f%%", 100 * v.communication_share);
  add();
  return line;
}

struct progress_options {
  bool terminal = false; ///< Redraw one line rather than print many.
  index_t every =
      1; ///< Without a terminal: print each step that is a multiple of it, the first and the last.
  bool silent = false; ///< Nothing at all: for the ranks that do not speak.
  int columns = 0;     ///< Of the terminal; 0: those it has when a line is drawn, or 80 if it does not say.
};

class progress {
public:
  /// `out` stays the caller's.
  explicit progress(std::FILE* out, progress_options options = {}) : out_(out), options_(options) {}
  progress(progress const&) = delete;
  progress& operator=(progress const&) = delete;
  ~progress() { end_line(); }

  void show(progress_values const& values) {
    if (options_.silent) return;
    if (options_.terminal) {
      // Back to the first column, clear, draw. The last column stays free: some terminals go to the next line
      // as soon as it is filled.
      std::fprintf(out_, "\r\x1b[K%s", progress_line(values, columns() - 1).c_str());
      drawn_ = true;
    } else if (!spoken_ || values.step % options_.every == 0 || values.step == values.steps) {
      std::fprintf(out_, "%s\n", progress_line(values).c_str());
      spoken_ = true;
    }
    std::fflush(out_);
  }

  /// A line that stays.
  void note(std::string_view text) {
    if (options_.silent) return;
    if (drawn_) std::fprintf(out_, "\r\x1b[K");
    drawn_ = false;
    std::fprintf(out_, "%.*s\n", narrow<int>(text.size()), text.data());
    std::fflush(out_);
  }

  /// Leaves the drawn line standing and goes to the next.
  void end_line() {
    if (drawn_) std::fprintf(out_, "\n");
    drawn_ = false;
  }

private:
  std::size_t columns() const {
    if (options_.columns > 0) return static_cast<std::size_t>(options_.columns);
    winsize size{};
    return ::ioctl(::fileno(out_), TIOCGWINSZ, &size) == 0 && size.ws_col > 0 ? size.ws_col : std::size_t{80};
  }

  std::FILE* out_;
  progress_options options_;
  bool drawn_ = false;
  bool spoken_ = false;
};

} // namespace tessera::inline TESSERA_ABI::train

#endif
