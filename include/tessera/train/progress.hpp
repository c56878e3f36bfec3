/// One line about where a run stands. On a terminal the line is redrawn in place; in a log each line stands
/// by itself, every so many steps.
///
///     progress shown(stderr, {.terminal = isatty(2), .every = 10});
///     shown.show({.step = 20, .steps = 100, .loss = 3.2, ...});
///     shown.note("checkpoint run/step-00000020");        // a line of its own, above the progress line
#ifndef TESSERA_TRAIN_PROGRESS_HPP
#define TESSERA_TRAIN_PROGRESS_HPP

#include <cmath>
#include <cstdio>
#include <string>
#include <string_view>

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

inline std::string progress_line(progress_values const& v) {
  auto const steps = std::to_string(v.steps);
  char text[256];
  std::snprintf(text, sizeof text, "step %*lld/%s  loss %.4f", narrow<int>(steps.size()),
                static_cast<long long>(v.step), steps.c_str(), v.loss);
  std::string line = text;
  if (v.validation_loss >= 0) {
    std::snprintf(text, sizeof text, "  val %.4f", v.validation_loss);
    line += text;
  }
  std::snprintf(text, sizeof text, "  lr %.2e  norm %.2f  %s tok/s", v.learning_rate, v.gradient_norm,
                rate_text(v.tokens_per_second).c_str());
  line += text;
  if (v.peak_share > 0) {
    std::snprintf(text, sizeof text, "  peak %.0f%%", 100 * v.peak_share);
    line += text;
  }
  std::snprintf(text, sizeof text, "  comm %.0f%%  left %s", 100 * v.communication_share,
                duration_text(v.seconds_left).c_str());
  return line + text;
}

struct progress_options {
  bool terminal = false; ///< Redraw one line rather than print many.
  index_t every =
      1; ///< Without a terminal: print each step that is a multiple of it, the first and the last.
  bool silent = false; ///< Nothing at all: for the ranks that do not speak.
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
    auto const line = progress_line(values);
    if (options_.terminal) {
      std::fprintf(out_, "\r\x1b[K%s", line.c_str()); // back to the first column, clear, draw
      drawn_ = true;
    } else if (!spoken_ || values.step % options_.every == 0 || values.step == values.steps) {
      std::fprintf(out_, "%s\n", line.c_str());
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
  std::FILE* out_;
  progress_options options_;
  bool drawn_ = false;
  bool spoken_ = false;
};

} // namespace tessera::inline TESSERA_ABI::train

#endif
