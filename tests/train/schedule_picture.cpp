#include <tessera/train/schedule_picture.hpp>

#include <limits>
#include <string>
#include <vector>

#include <doctest/doctest.h>

using namespace tessera;
using namespace tessera::layout;
using train::schedule_picture;

namespace {

/// True when every tag is closed in order and no text holds a bare '&'.
bool well_formed(std::string const& svg) {
  std::vector<std::string> open;
  for (std::size_t at = svg.find('<'); at != std::string::npos; at = svg.find('<', at + 1)) {
    auto const end = svg.find('>', at);
    if (end == std::string::npos) return false;
    auto const tag = svg.substr(at + 1, end - at - 1);
    if (tag.find('<') != std::string::npos || std::count(tag.begin(), tag.end(), '"') % 2 != 0) return false;
    if (tag[0] == '/') {
      if (open.empty() || open.back() != tag.substr(1)) return false;
      open.pop_back();
    } else if (tag.back() != '/')
      open.push_back(tag.substr(0, tag.find(' ')));
  }
  return open.empty() && svg.find("nan") == std::string::npos && svg.find("inf") == std::string::npos;
}

std::size_t count(std::string const& text, std::string const& piece) {
  std::size_t found = 0;
  for (auto at = text.find(piece); at != std::string::npos; at = text.find(piece, at + 1)) ++found;
  return found;
}

} // namespace

TEST_CASE("each computation is a box in its stage's row, and messages are none") {
  for (auto kind : {schedule_kind::gpipe, schedule_kind::one_forward_one_backward}) {
    auto const svg = schedule_picture({.timeline = simulate(make_schedule(kind, {4, 6, 1}))});
    CHECK(well_formed(svg));
    CHECK(count(svg, "<rect class=\"fw\" fill-opacity") == 24);
    CHECK(count(svg, "<rect class=\"bi\" fill-opacity") == 24);
    CHECK(count(svg, "<rect class=\"bw\" fill-opacity") == 0);
    CHECK(count(svg, ">stage ") == 4);
    CHECK(svg.find("idle, 33.3 % of the time") != std::string::npos);
  }
}

TEST_CASE("halves of a backward are drawn apart, and chunks in shades") {
  auto svg = schedule_picture({.timeline = simulate(make_schedule(schedule_kind::zero_bubble, {2, 3, 1}))});
  CHECK(count(svg, "<rect class=\"bw\" fill-opacity") == 6);
  CHECK(svg.find("backward, weights") != std::string::npos);
  svg = schedule_picture(
      {.timeline = simulate(make_schedule(schedule_kind::interleaved_one_forward_one_backward, {2, 4, 2}))});
  CHECK(well_formed(svg));
  CHECK(count(svg, "<rect class=\"fw\" fill-opacity=\"1.00\"") == 8);
  CHECK(count(svg, "<rect class=\"fw\" fill-opacity=\"0.50\"") == 8);
}

TEST_CASE("a measured timeline begins where its first action does, in the unit that was asked for") {
  schedule_timeline run;
  run.stages = {{{{action_kind::forward, 0, 0}, 1000.5, 1000.6}},
                {{{action_kind::forward, 0, 0}, 1000.6, 1000.7}}};
  auto const svg = schedule_picture({.unit = "milliseconds", .scale = 1000, .timeline = run});
  CHECK(well_formed(svg));
  CHECK(svg.find("x=\"92.00\"") != std::string::npos);
  CHECK(svg.find(">200</text>") != std::string::npos);
}

TEST_CASE("nothing to draw, and times that are not finite, leave a frame") {
  CHECK(well_formed(schedule_picture({})));
  schedule_timeline run;
  auto const nan = std::numeric_limits<double>::quiet_NaN();
  run.stages = {{{{action_kind::forward, 0, 0}, nan, 1}, {{action_kind::forward, 1, 0}, 0, HUGE_VAL}}, {}};
  CHECK(well_formed(schedule_picture({.timeline = run})));
}

TEST_CASE("titles may hold any character") {
  auto const svg = schedule_picture({.title = "<a & \"b\">", .subtitle = "p < m", .unit = "\x01&"});
  CHECK(well_formed(svg));
  CHECK(svg.find("&lt;a &amp; &quot;b&quot;&gt;") != std::string::npos);
}
