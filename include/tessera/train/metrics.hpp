/// metrics.csv: one row a step, appended as the run goes. Each row is one write of a whole line, so that a
/// killed run leaves at most one cut line at the end. A resumed run drops what lies after the step that it
/// resumes from, so that the file holds each step exactly once. Rows are on the disk after `sync`, which is
/// called before a checkpoint that follows them is committed: its resumption finds every row up to its step.
///
///     metrics_file file("run/metrics.csv", resumed_step);
///     file.append({.step = 21, .tokens = 43008, .loss = 3.1, ...});
///     file.sync();
///     auto rows = read_metrics("run/metrics.csv");
#ifndef TESSERA_TRAIN_METRICS_HPP
#define TESSERA_TRAIN_METRICS_HPP

#include <cerrno>
#include <charconv>
#include <cmath>
#include <cstdio>
#include <cstring>
#include <limits>
#include <string>
#include <string_view>
#include <vector>

#include <fcntl.h>
#include <unistd.h>

#include <tessera/io/atomic_file.hpp>

namespace tessera::inline TESSERA_ABI::train {

/// One step. Losses are in nats per token; NaN stands for "not measured at this step".
struct metrics_row {
  double step = 0;
  double tokens = 0; ///< Trained on since the run began.
  double loss = 0;
  double validation_loss = std::numeric_limits<double>::quiet_NaN();
  double learning_rate = 0;
  double gradient_norm = 0;
  double tokens_per_second = 0;
  double peak_share = 0;
  double communication_share = 0;
};

namespace detail {

using metrics_member = double metrics_row::*;
struct metrics_column {
  char const* name;
  metrics_member member; // by an alias: nvcc writes the type itself in a way that g++ warns of
};
inline constexpr metrics_column metrics_columns[] = {
    {"step", &metrics_row::step},
    {"tokens", &metrics_row::tokens},
    {"loss", &metrics_row::loss},
    {"validation_loss", &metrics_row::validation_loss},
    {"learning_rate", &metrics_row::learning_rate},
    {"gradient_norm", &metrics_row::gradient_norm},
    {"tokens_per_second", &metrics_row::tokens_per_second},
    {"peak_share", &metrics_row::peak_share},
    {"communication_share", &metrics_row::communication_share},
};

inline std::string metrics_header() {
  std::string line;
  for (auto const& column : metrics_columns) line += (line.empty() ? "" : ",") + std::string(column.name);
  return line + '\n';
}

/// Shortest digits that read back to the same value; an empty cell for NaN.
inline std::string metrics_line(metrics_row const& row) {
  std::string line;
  for (auto const& column : metrics_columns) {
    auto const value = row.*column.member;
    char digits[40];
    auto const end = std::isnan(value) ? digits : std::to_chars(digits, digits + sizeof digits, value).ptr;
    if (&column != metrics_columns) line += ',';
    line.append(digits, end);
  }
  return line + '\n';
}

/// True, and `row` filled, when the line has a number or nothing in every column.
inline bool parse_metrics_line(std::string_view line, metrics_row& row) {
  auto const* at = line.data();
  auto const* const end = at + line.size();
  for (auto const& column : metrics_columns) {
    if (&column != metrics_columns) {
      if (at == end || *at != ',') return false;
      ++at;
    }
    row.*column.member = std::numeric_limits<double>::quiet_NaN();
    if (at == end || *at == ',') continue;
    auto const result = std::from_chars(at, end, row.*column.member);
    if (result.ec != std::errc{}) return false;
    at = result.ptr;
  }
  return at == end;
}

inline std::string file_text_or_nothing(std::string const& path, site where) {
  std::string text;
  auto* const file = std::fopen(path.c_str(), "rb");
  if (file == nullptr) {
    if (errno == ENOENT) return text;
    throw io_error("E-train-020", where, "cannot open ", path, ": ", std::strerror(errno));
  }
  char piece[65536];
  for (std::size_t got; (got = std::fread(piece, 1, sizeof piece, file)) > 0;) text.append(piece, got);
  auto const cause = std::ferror(file) != 0 ? errno : 0;
  std::fclose(file);
  if (cause != 0) throw io_error("E-train-020", where, "cannot read ", path, ": ", std::strerror(cause));
  return text;
}

} // namespace detail

/// The whole rows of a metrics file; a missing file has none. A line that a killed run cut is left out.
/// Throws io_error for a file that cannot be read, or whose first line is not the header.
inline std::vector<metrics_row> read_metrics(std::string const& path, site where = site::here()) {
  auto const text = detail::file_text_or_nothing(path, where);
  std::vector<metrics_row> rows;
  auto const header = detail::metrics_header();
  if (text.size() < header.size()) return rows; // not even the header was written whole
  if (text.compare(0, header.size(), header) != 0)
    throw io_error("E-train-021", where, path, " does not begin with the header ", header,
                   "it belongs to another program or version; move it away");
  for (std::size_t begin = header.size(), end; begin < text.size(); begin = end + 1) {
    end = text.find('\n', begin);
    if (end == std::string::npos) break;
    metrics_row row;
    if (detail::parse_metrics_line(std::string_view(text).substr(begin, end - begin), row))
      rows.push_back(row);
  }
  return rows;
}

/// Appends to a metrics file. Move it nowhere; one process writes it.
class metrics_file {
public:
  /// Keeps the rows up to and including `resumed_step`, drops the rest. Throws io_error.
  metrics_file(std::string path, index_t resumed_step, site where = site::here()) : path_(std::move(path)) {
    auto const rows = read_metrics(path_, where);
    auto text = detail::metrics_header();
    for (auto const& row : rows)
      if (row.step <= static_cast<double>(resumed_step)) text += detail::metrics_line(row);
    io::write_file(path_, text, where); // in one step: a kill leaves the old rows or the kept ones
    file_ = io::detail::descriptor(::open(path_.c_str(), O_WRONLY | O_APPEND | O_CLOEXEC));
    if (!file_.open())
      throw io_error("E-train-020", where, "cannot open ", path_, ": ", std::strerror(errno));
  }
  metrics_file(metrics_file const&) = delete;
  metrics_file& operator=(metrics_file const&) = delete;

  /// Throws io_error for a row that cannot be written.
  void append(metrics_row const& row, site where = site::here()) {
    auto const line = detail::metrics_line(row);
    io::detail::write_all(file_, std::as_bytes(std::span(line)), path_, where);
  }

  /// Waits until the rows are on the disk. Throws io_error where they cannot come there.
  void sync(site where = site::here()) { io::detail::sync(file_, path_, where); }

private:
  std::string path_;
  io::detail::descriptor file_;
};

} // namespace tessera::inline TESSERA_ABI::train

#endif
