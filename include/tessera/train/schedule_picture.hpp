/// A pipeline's timeline as one self-contained SVG: a row for each stage, a box for each forward and backward
/// with its micro-batch's number, idle time left grey. From a plan or from a real run:
///
///     auto svg = schedule_picture({.title = "1F1B", .timeline = layout::simulate(plan)});
#ifndef TESSERA_TRAIN_SCHEDULE_PICTURE_HPP
#define TESSERA_TRAIN_SCHEDULE_PICTURE_HPP

#include <algorithm>

#include <tessera/layout/schedule_simulator.hpp>
#include <tessera/train/detail/svg.hpp>

namespace tessera::inline TESSERA_ABI::train {

struct schedule_picture_options {
  std::string title = "Pipeline schedule";
  std::string subtitle{};
  std::string unit = "time, in forwards";
  double scale = 1; ///< Of the timeline's times to `unit`: 1000 for seconds that are drawn as milliseconds.
  layout::schedule_timeline timeline{};
};

namespace detail {

/// Where times and stages lie in the drawing.
struct gantt_frame {
  static constexpr double left = 92, right = 866, top = 112, row = 40, box = 30;
  double begin = 0, length = 1;
  std::size_t rows = 0;

  double x(double time) const { return left + (time - begin) / length * (right - left); }
  double y(std::size_t stage) const { return top + row * static_cast<double>(stage); }
  double bottom() const { return y(rows); }
};

inline char const* gantt_style(layout::action_kind kind) {
  return kind == layout::action_kind::forward            ? "fw"
         : kind == layout::action_kind::backward_weights ? "bw"
                                                         : "bi";
}

/// Chunks after the first are paler.
inline std::string gantt_box(gantt_frame const& f, std::size_t stage, layout::timed_action const& a,
                             int chunks) {
  auto const x = f.x(a.begin), width = f.x(a.end) - x, y = f.y(stage);
  auto const paleness = chunks > 1 ? 0.5 * a.what.chunk / (chunks - 1) : 0.0;
  auto svg = formatted("<rect class=\"%s\" fill-opacity=\"%.2f\" x=\"%.2f\" y=\"%.1f\" width=\"%.2f\" "
                       "height=\"%.1f\"/>\n",
                       gantt_style(a.what.kind), 1 - paleness, x, y, width, f.box);
  auto const number = std::to_string(a.what.micro_batch);
  if (width < 4 + 7.0 * static_cast<double>(number.size())) return svg;
  return svg +
         formatted("<text class=\"%s\" text-anchor=\"middle\" x=\"%.2f\" y=\"%.1f\">",
                   paleness > 0.3 ? "dark" : "light", x + width / 2, y + f.box / 2 + 4) +
         number + "</text>\n";
}

inline std::string gantt_axis(gantt_frame const& f, double scale, std::string const& unit) {
  std::string svg;
  auto const length = f.length * scale;
  auto const step = tick_step(length, 10);
  auto const y = f.bottom() + 2;
  svg += formatted("<line class=\"axis\" x1=\"%.1f\" y1=\"%.1f\" x2=\"%.1f\" y2=\"%.1f\"/>\n", f.left, y,
                   f.right, y);
  for (double k = 0; k * step <= length * (1 + 1e-9); ++k) {
    auto const x = f.x(f.begin + k * step / scale);
    svg +=
        formatted("<line class=\"axis\" x1=\"%.1f\" y1=\"%.1f\" x2=\"%.1f\" y2=\"%.1f\"/>\n", x, y, x, y + 5);
    svg += formatted("<text class=\"tick\" text-anchor=\"middle\" x=\"%.1f\" y=\"%.1f\">%.10g</text>\n", x,
                     y + 21, k * step);
  }
  return svg +
         formatted("<text class=\"name\" text-anchor=\"middle\" x=\"%.1f\" y=\"%.1f\">",
                   (f.left + f.right) / 2, y + 44) +
         escaped(unit) + "</text>\n";
}

/// The kinds that occur, and the share of idle time.
inline std::string gantt_legend(layout::schedule_timeline const& run, bool halves) {
  struct entry {
    char const* style;
    char const* name;
  };
  std::vector<entry> entries{{"fw", "forward"}};
  if (halves) {
    entries.push_back({"bi", "backward, input"});
    entries.push_back({"bw", "backward, weights"});
  } else {
    entries.push_back({"bi", "backward"});
  }
  entries.push_back({"idle", ""});
  std::string svg;
  double x = gantt_frame::left;
  for (auto const& e : entries) {
    auto const name = e.name[0] != 0 ? std::string(e.name)
                                     : formatted("idle, %.1f %% of the time", 100 * run.bubble_share());
    svg += formatted("<rect class=\"%s\" x=\"%.1f\" y=\"80\" width=\"14\" height=\"14\"/>\n", e.style, x);
    svg += formatted("<text class=\"name\" x=\"%.1f\" y=\"91.5\">", x + 20) + name + "</text>\n";
    x += 44 + 7.0 * static_cast<double>(name.size());
  }
  return svg;
}

} // namespace detail

/// The picture, 960 wide and as high as the stages need. Boxes whose times are not finite are left out.
inline std::string schedule_picture(schedule_picture_options const& options) {
  using detail::formatted;
  layout::schedule_timeline run;
  int chunks = 1;
  bool halves = false;
  for (auto const& stage : options.timeline.stages) {
    run.stages.emplace_back();
    for (auto const& a : stage) {
      if (!std::isfinite(a.begin) || !std::isfinite(a.end) || !layout::computes(a.what.kind)) continue;
      run.stages.back().push_back(a);
      chunks = (std::max)(chunks, a.what.chunk + 1);
      halves = halves || a.what.kind == layout::action_kind::backward_weights;
    }
  }
  detail::gantt_frame frame{.begin = run.first(), .length = run.length(), .rows = run.stages.size()};
  if (!(frame.length > 0)) frame.length = 1;

  auto const height = frame.bottom() + 64;
  auto svg = formatted("<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 960 %.0f\" width=\"960\" "
                       "height=\"%.0f\" ",
                       height, height);
  svg += "role=\"img\" font-family=\"Inter, 'Helvetica Neue', Arial, 'DejaVu Sans', sans-serif\">\n<title>" +
         detail::escaped(options.title) +
         "</title>\n<style>\n"
         ".title{font-size:20px;font-weight:600;fill:#1b2733}.sub{font-size:13px;fill:#5b6b7b}\n"
         ".tick{font-size:12px;fill:#5b6b7b}.name{font-size:13px;fill:#36475a}\n"
         ".axis{stroke:#93a1b0;stroke-width:1}.idle{fill:#e6ebf0}\n"
         ".fw{fill:#2f6fde}.bi{fill:#e0702a}.bw{fill:#2f9e72}\n"
         ".fw,.bi,.bw{stroke:#fff;stroke-width:1}\n"
         ".light{font-size:12px;fill:#fff}.dark{font-size:12px;fill:#1b2733}\n</style>\n";
  svg += formatted("<rect width=\"960\" height=\"%.0f\" fill=\"#fff\"/>\n", height);
  svg += "<text class=\"title\" x=\"24\" y=\"36\">" + detail::escaped(options.title) + "</text>\n";
  svg += "<text class=\"sub\" x=\"24\" y=\"58\">" + detail::escaped(options.subtitle) + "</text>\n";
  svg += detail::gantt_legend(run, halves);
  for (std::size_t stage = 0; stage < run.stages.size(); ++stage) {
    auto const y = frame.y(stage);
    svg += formatted("<text class=\"name\" text-anchor=\"end\" x=\"%.1f\" y=\"%.1f\">stage %zu</text>\n",
                     frame.left - 12, y + frame.box / 2 + 4, stage);
    svg += formatted("<rect class=\"idle\" x=\"%.1f\" y=\"%.1f\" width=\"%.1f\" height=\"%.1f\"/>\n",
                     frame.left, y, frame.right - frame.left, frame.box);
    for (auto const& a : run.stages[stage]) svg += detail::gantt_box(frame, stage, a, chunks);
  }
  return svg + detail::gantt_axis(frame, options.scale > 0 ? options.scale : 1, options.unit) + "</svg>\n";
}

} // namespace tessera::inline TESSERA_ABI::train

#endif
