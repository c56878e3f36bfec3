#include <doctest/doctest.h>

#include <limits>

#include <tessera/train/loss_curve.hpp>

using namespace tessera;
using train::curve_point;
using train::loss_curve;

namespace {

/// True when every tag is closed in order and no text holds a bare '<' or '&': what an XML reader insists on.
bool well_formed(std::string const& svg) {
  std::vector<std::string> open;
  for (std::size_t at = 0; at < svg.size();) {
    if (svg[at] == '&') {
      auto const end = svg.find(';', at);
      if (end == std::string::npos || end - at > 6) return false;
      at = end;
    }
    if (svg[at] != '<') {
      ++at;
      continue;
    }
    auto const end = svg.find('>', at);
    if (end == std::string::npos) return false;
    auto const tag = svg.substr(at + 1, end - at - 1);
    if (tag.find('<') != std::string::npos) return false;
    if (std::count(tag.begin(), tag.end(), '"') % 2 != 0) return false;
    if (tag[0] == '/') {
      if (open.empty() || open.back() != tag.substr(1)) return false;
      open.pop_back();
    } else if (tag.back() != '/')
      open.push_back(tag.substr(0, tag.find(' ')));
    at = end + 1;
  }
  return open.empty();
}

std::vector<curve_point> falling(int points) {
  std::vector<curve_point> result;
  for (int i = 1; i <= points; ++i) result.push_back({1.0 * i, 2 + 4 * std::exp(-i / 50.0)});
  return result;
}

} // namespace

TEST_CASE("the picture is well-formed with any number of points") {
  for (int points : {0, 1, 2, 59, 61, 1000, 20011}) {
    CAPTURE(points);
    auto const svg = loss_curve({.training = falling(points), .validation = falling(points / 10)});
    CHECK(well_formed(svg));
    CHECK(svg.find("nan") == std::string::npos);
    CHECK(svg.find("inf") == std::string::npos);
    CHECK(svg.size() < 80000);
  }
}

TEST_CASE("values that are not finite are left out") {
  auto points = falling(10);
  points[3].loss = std::numeric_limits<double>::quiet_NaN();
  points[5].loss = std::numeric_limits<double>::infinity();
  auto const svg = loss_curve({.training = points, .levels = {{"lost", std::nan("")}}});
  CHECK(well_formed(svg));
  CHECK(svg.find("nan") == std::string::npos);
  CHECK(svg.find("lost") == std::string::npos);
}

TEST_CASE("title and names are escaped") {
  auto const svg = loss_curve({.title = "a < b & \"c\"", .levels = {{"<uni>", 3}}});
  CHECK(well_formed(svg));
  CHECK(svg.find("a &lt; b &amp; &quot;c&quot;") != std::string::npos);
  CHECK(svg.find("&lt;uni&gt; 3.000") != std::string::npos);
}

TEST_CASE("both curves carry their last value, and the levels theirs") {
  auto const svg =
      loss_curve({.training = {{1, 4}, {2, 2}}, .validation = {{2, 2.5}}, .levels = {{"bigram", 2.3}}});
  CHECK(svg.find("training 2.000") != std::string::npos);
  CHECK(svg.find("validation 2.500") != std::string::npos);
  CHECK(svg.find("bigram 2.300") != std::string::npos);
}

TEST_CASE("labels at the border do not cover each other") {
  std::vector<train::detail::border_label> const labels{
      {100, "s", "a"}, {101, "s", "b"}, {102, "s", "c"}, {470, "s", "d"}};
  auto const svg = train::detail::border_labels(labels, 0, 470);
  std::vector<double> heights;
  for (auto at = svg.find("y=\""); at != std::string::npos; at = svg.find("y=\"", at + 1))
    heights.push_back(std::stod(svg.substr(at + 3)));
  REQUIRE(heights.size() == 4);
  for (std::size_t i = 1; i < heights.size(); ++i) CHECK(heights[i] - heights[i - 1] >= 16.9);
  CHECK(heights.back() <= 474.1);
}

TEST_CASE("ticks stand at 1, 2 or 5 times a power of ten") {
  CHECK(train::detail::tick_step(1, 5) == doctest::Approx(0.2));
  CHECK(train::detail::tick_step(1200, 8) == doctest::Approx(200));
  CHECK(train::detail::tick_step(4.3, 6) == doctest::Approx(0.5).epsilon(0.5));
}
