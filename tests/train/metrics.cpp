#include <doctest/doctest.h>

#include <cstdlib>

#include <sys/stat.h>

#include <tessera/train/metrics.hpp>

#include "support/temporary_folder.hpp"

using namespace tessera;
using train::metrics_file;
using train::metrics_row;
using train::read_metrics;

namespace {

std::string text_in(std::string const& path) {
  return train::detail::file_text_or_nothing(path, site::here());
}

void append_text(std::string const& path, std::string const& text) {
  auto* const file = std::fopen(path.c_str(), "ab");
  std::fwrite(text.data(), 1, text.size(), file);
  std::fclose(file);
}

} // namespace

TEST_CASE("rows read back to the very values that were appended") {
  test::temporary_folder const folder;
  {
    metrics_file file((folder / "metrics.csv"), 0);
    file.append({.step = 1, .tokens = 1e15, .loss = 0.1 + 0.2, .learning_rate = 1e-300});
    file.append({.step = 2, .loss = 3, .validation_loss = 2.5});
  }
  auto const rows = read_metrics((folder / "metrics.csv"));
  REQUIRE(rows.size() == 2);
  CHECK(rows[0].loss == 0.1 + 0.2);
  CHECK(rows[0].tokens == 1e15);
  CHECK(rows[0].learning_rate == 1e-300);
  CHECK(std::isnan(rows[0].validation_loss));
  CHECK(rows[1].validation_loss == 2.5);
  CHECK(text_in((folder / "metrics.csv")).substr(0, 39) == "step,tokens,loss,validation_loss,learni");
}

TEST_CASE("a resumed run keeps the rows up to its step and holds each step once") {
  test::temporary_folder const folder;
  {
    metrics_file file((folder / "metrics.csv"), 0);
    for (int step = 1; step <= 7; ++step) file.append({.step = double(step), .loss = 1.0 * step});
  }
  {
    metrics_file file((folder / "metrics.csv"), 4);
    for (int step = 5; step <= 9; ++step) file.append({.step = double(step), .loss = 10.0 * step});
  }
  auto const rows = read_metrics((folder / "metrics.csv"));
  REQUIRE(rows.size() == 9);
  for (std::size_t i = 0; i < 9; ++i) {
    CHECK(rows[i].step == static_cast<double>(i + 1));
    CHECK(rows[i].loss == (i < 4 ? 1.0 : 10.0) * static_cast<double>(i + 1));
  }
}

TEST_CASE("a line that a kill cut is dropped") {
  test::temporary_folder const folder;
  for (auto const* cut : {"3,", "3,1,2", "3,1,2,,1,1,1,1,1", "step"}) {
    CAPTURE(std::string(cut));
    {
      metrics_file file((folder / "metrics.csv"), 0);
      file.append({.step = 1});
      file.append({.step = 2});
    }
    append_text((folder / "metrics.csv"), cut);
    CHECK(read_metrics((folder / "metrics.csv")).size() == 2);
    metrics_file again((folder / "metrics.csv"), 2);
    again.append({.step = 3});
    CHECK(read_metrics((folder / "metrics.csv")).size() == 3);
  }
}

TEST_CASE("a missing file, an empty one and a cut header have no rows") {
  test::temporary_folder const folder;
  CHECK(read_metrics((folder / "metrics.csv")).empty());
  append_text((folder / "metrics.csv"), "");
  CHECK(read_metrics((folder / "metrics.csv")).empty());
  append_text((folder / "metrics.csv"), "step,tok");
  CHECK(read_metrics((folder / "metrics.csv")).empty());
}

TEST_CASE("a foreign file is refused and left as it was") {
  test::temporary_folder const folder;
  auto const foreign = std::string(200, 'x') + "\n";
  append_text((folder / "metrics.csv"), foreign);
  try {
    metrics_file file((folder / "metrics.csv"), 0);
    FAIL("the foreign file was accepted");
  } catch (io_error const& fault) {
    CHECK(std::string(fault.id()) == "E-train-021");
  }
  CHECK(text_in((folder / "metrics.csv")) == foreign);
}

TEST_CASE("a folder that is not there is an error that names the path") {
  try {
    metrics_file file("/nonexistent_folder/metrics.csv", 0);
    FAIL("a file was made in a missing folder");
  } catch (io_error const& fault) {
    CHECK(std::string(fault.id()) == "E-train-020");
    CHECK(std::string(fault.what()).find("/nonexistent_folder") != std::string::npos);
  }
}

TEST_CASE("a full disk is an error, not a lost row" * doctest::skip(::access("/dev/full", W_OK) != 0)) {
  test::temporary_folder const folder;
  metrics_file file((folder / "metrics.csv"), 0);
  file.append({.step = 1});
  ::unlink((folder / "metrics.csv").c_str());
  REQUIRE(::symlink("/dev/full", ((folder / "metrics.csv") + ".new").c_str()) == 0);
  CHECK_THROWS_AS(metrics_file((folder / "metrics.csv"), 0), io_error);
}
