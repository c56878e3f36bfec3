/// The loss curves of a run as one self-contained SVG: training and validation loss over the steps, with
/// level lines to compare with, such as the entropies that a unigram and a bigram model of the text reach.
///
///     auto svg = loss_curve({.title = "King James text", .training = points, .validation = others,
///                            .levels = {{"unigram", 3.05}, {"bigram", 2.32}}});
#ifndef TESSERA_TRAIN_LOSS_CURVE_HPP
#define TESSERA_TRAIN_LOSS_CURVE_HPP

#include <algorithm>
#include <vector>

#include <tessera/train/detail/svg.hpp>

namespace tessera::inline TESSERA_ABI::train {

struct curve_point {
  double step = 0;
  double loss = 0;
};

struct curve_level {
  std::string name;
  double loss = 0;
};

struct loss_curve_options {
  std::string title = "Loss";
  std::string subtitle{};
  std::string unit = "nats per byte";
  std::vector<curve_point> training{};
  std::vector<curve_point> validation{};
  std::vector<curve_level> levels{};
};

namespace detail {

/// Mean of each of at most `most` stretches of the curve, so that a long run draws as fast as a short one.
inline std::vector<curve_point> thinned(std::vector<curve_point> const& points, std::size_t most) {
  std::vector<curve_point> finite, result;
  for (auto const& p : points)
    if (std::isfinite(p.loss) && std::isfinite(p.step)) finite.push_back(p);
  auto const stretch = (finite.size() + most - 1) / most;
  for (std::size_t begin = 0; begin < finite.size(); begin += stretch) {
    auto const end = (std::min)(begin + stretch, finite.size());
    curve_point mean;
    for (auto i = begin; i < end; ++i) mean.step += finite[i].step, mean.loss += finite[i].loss;
    result.push_back(
        {mean.step / static_cast<double>(end - begin), mean.loss / static_cast<double>(end - begin)});
  }
  return result;
}

/// The trend in the noise: the mean of the points around each, fewer towards both ends, where the curve is
/// steep or its last value matters.
inline std::vector<curve_point> smoothed(std::vector<curve_point> const& points) {
  auto result = points;
  std::vector<double> until(points.size() + 1, 0.0);
  for (std::size_t i = 0; i < points.size(); ++i) until[i + 1] = until[i] + points[i].loss;
  for (std::size_t i = 0; i < points.size(); ++i) {
    auto const reach = (std::min)({i / 8, points.size() / 60, points.size() - 1 - i});
    result[i].loss = (until[i + reach + 1] - until[i - reach]) / static_cast<double>(2 * reach + 1);
  }
  return result;
}

/// Maps (step, loss) into the drawing.
struct chart_frame {
  double left = 72, right = 814, top = 84, bottom = 470;
  double first_step = 0, last_step = 1, low = 0, high = 1;

  double x(double step) const {
    return left + (step - first_step) / (last_step - first_step) * (right - left);
  }
  double y(double loss) const { return bottom - (loss - low) / (high - low) * (bottom - top); }

  std::string path(std::vector<curve_point> const& points) const {
    std::string d;
    for (auto const& p : points) d += formatted("%s%.1f,%.1f", d.empty() ? "M" : " ", x(p.step), y(p.loss));
    return d;
  }
};

inline std::string chart_axes(chart_frame const& f, std::string const& unit) {
  std::string svg;
  auto const loss_step = tick_step(f.high - f.low, 6);
  for (auto k = std::ceil(f.low / loss_step - 1e-9); k * loss_step <= f.high * (1 + 1e-9); ++k) {
    auto const y = f.y(k * loss_step);
    svg += formatted("<line class=\"grid\" x1=\"%.1f\" y1=\"%.1f\" x2=\"%.1f\" y2=\"%.1f\"/>\n", f.left, y,
                     f.right, y);
    svg += formatted("<text class=\"tick\" text-anchor=\"end\" x=\"%.1f\" y=\"%.1f\">%.4g</text>\n",
                     f.left - 10, y + 4, k * loss_step);
  }
  auto const step_step = (std::max)(1.0, tick_step(f.last_step - f.first_step, 8));
  for (auto k = std::ceil(f.first_step / step_step); k * step_step <= f.last_step; ++k) {
    auto const x = f.x(k * step_step);
    svg += formatted("<line class=\"axis\" x1=\"%.1f\" y1=\"%.1f\" x2=\"%.1f\" y2=\"%.1f\"/>\n", x, f.bottom,
                     x, f.bottom + 5);
    svg += formatted("<text class=\"tick\" text-anchor=\"middle\" x=\"%.1f\" y=\"%.1f\">%.10g</text>\n", x,
                     f.bottom + 21, k * step_step);
  }
  svg += formatted("<line class=\"axis\" x1=\"%.1f\" y1=\"%.1f\" x2=\"%.1f\" y2=\"%.1f\"/>\n", f.left,
                   f.bottom, f.right, f.bottom);
  svg += formatted("<text class=\"name\" text-anchor=\"middle\" x=\"%.1f\" y=\"%.1f\">step</text>\n",
                   (f.left + f.right) / 2, f.bottom + 46);
  auto const middle = (f.top + f.bottom) / 2;
  return svg +
         formatted(
             "<text class=\"name\" text-anchor=\"middle\" transform=\"translate(22,%.1f) rotate(-90)\">",
             middle) +
         escaped(unit) + "</text>\n";
}

/// Labels at the right border, moved apart so that none covers another.
struct border_label {
  double y;
  std::string style, text;
};
inline std::string border_labels(std::vector<border_label> labels, double x, double bottom) {
  std::sort(labels.begin(), labels.end(), [](auto const& a, auto const& b) { return a.y < b.y; });
  constexpr auto apart = 17.0;
  for (std::size_t i = 1; i < labels.size(); ++i)
    labels[i].y = (std::max)(labels[i].y, labels[i - 1].y + apart);
  for (auto i = labels.size(); i-- > 0;) {
    auto const limit = i + 1 < labels.size() ? labels[i + 1].y - apart : bottom;
    labels[i].y = (std::min)(labels[i].y, limit);
  }
  std::string svg;
  for (auto const& label : labels)
    svg += "<text class=\"" + label.style + "\"" + formatted(" x=\"%.1f\" y=\"%.1f\">", x, label.y + 4) +
           escaped(label.text) + "</text>\n";
  return svg;
}

} // namespace detail

/// The picture, 960 by 540. Points that are not finite are left out; with no points at all the frame remains.
inline std::string loss_curve(loss_curve_options const& options) {
  using detail::formatted;
  auto const training = detail::thinned(options.training, 1500);
  auto const validation = detail::thinned(options.validation, 300);
  auto const trend = detail::smoothed(training);

  detail::chart_frame frame;
  auto low = HUGE_VAL, high = -HUGE_VAL, last = 1.0;
  auto const see = [&](double step, double loss) {
    low = (std::min)(low, loss);
    high = (std::max)(high, loss);
    last = (std::max)(last, step);
  };
  for (auto const& p : training) see(p.step, p.loss);
  for (auto const& p : validation) see(p.step, p.loss);
  for (auto const& level : options.levels) see(0, level.loss);
  if (!(low <= high)) low = 0, high = 1;
  auto const margin = 0.06 * (std::max)(high - low, 1e-3);
  frame.low = (std::max)(0.0, low - margin);
  frame.high = high + margin;
  frame.last_step = last;

  std::string svg =
      "<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 960 540\" width=\"960\" height=\"540\" "
      "role=\"img\" font-family=\"Inter, 'Helvetica Neue', Arial, 'DejaVu Sans', sans-serif\">\n<title>" +
      detail::escaped(options.title) +
      "</title>\n<style>\n"
      ".title{font-size:20px;font-weight:600;fill:#1b2733}.sub{font-size:13px;fill:#5b6b7b}\n"
      ".tick{font-size:12px;fill:#5b6b7b}.name{font-size:13px;fill:#36475a}\n"
      ".grid{stroke:#e6ebf0;stroke-width:1}.axis{stroke:#93a1b0;stroke-width:1}\n"
      ".raw{fill:none;stroke:#2f6fde;stroke-width:1;opacity:.25;stroke-linejoin:round}\n"
      ".train{fill:none;stroke:#2f6fde;stroke-width:2.2;stroke-linejoin:round;stroke-linecap:round}\n"
      ".valid{fill:none;stroke:#e0702a;stroke-width:2.2;stroke-linejoin:round;stroke-linecap:round}\n"
      ".dot{fill:#fff;stroke:#e0702a;stroke-width:1.8}\n"
      ".level{stroke:#7d8a97;stroke-width:1.3;stroke-dasharray:6 5}\n"
      ".l-train{font-size:13px;font-weight:600;fill:#2f6fde}.l-valid{font-size:13px;font-weight:600;fill:#"
      "e0702a}\n"
      ".l-level{font-size:12px;fill:#5b6b7b}\n</style>\n"
      "<rect width=\"960\" height=\"540\" fill=\"#fff\"/>\n";
  svg += "<text class=\"title\" x=\"24\" y=\"36\">" + detail::escaped(options.title) + "</text>\n";
  svg += "<text class=\"sub\" x=\"24\" y=\"58\">" + detail::escaped(options.subtitle) + "</text>\n";
  svg += detail::chart_axes(frame, options.unit);

  std::vector<detail::border_label> labels;
  for (auto const& level : options.levels) {
    if (!std::isfinite(level.loss)) continue;
    auto const y = frame.y(level.loss);
    svg += formatted("<line class=\"level\" x1=\"%.1f\" y1=\"%.1f\" x2=\"%.1f\" y2=\"%.1f\"/>\n", frame.left,
                     y, frame.right, y);
    labels.push_back({y, "l-level", level.name + formatted(" %.3f", level.loss)});
  }
  if (!training.empty()) {
    svg += "<path class=\"raw\" d=\"" + frame.path(training) + "\"/>\n";
    svg += "<path class=\"train\" d=\"" + frame.path(trend) + "\"/>\n";
    labels.push_back({frame.y(trend.back().loss), "l-train", formatted("training %.3f", trend.back().loss)});
  }
  if (!validation.empty()) {
    svg += "<path class=\"valid\" d=\"" + frame.path(validation) + "\"/>\n";
    if (validation.size() <= 60)
      for (auto const& p : validation)
        svg += formatted("<circle class=\"dot\" cx=\"%.1f\" cy=\"%.1f\" r=\"3.4\"/>\n", frame.x(p.step),
                         frame.y(p.loss));
    labels.push_back(
        {frame.y(validation.back().loss), "l-valid", formatted("validation %.3f", validation.back().loss)});
  }
  return svg + detail::border_labels(labels, frame.right + 10, frame.bottom) + "</svg>\n";
}

} // namespace tessera::inline TESSERA_ABI::train

#endif
