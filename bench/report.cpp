// Turns the raw output of the benchmark programs (DIR/raw/*.json) into three files: report.json, a list of
// {name, value, unit, kind, peer, ratio, noise}; report.md, the same as a table; report.svg, the ratios as
// bars. What several processes measured is one row: the median of theirs.
#include <algorithm>
#include <filesystem>
#include <fstream>
#include <iostream>
#include <map>
#include <sstream>
#include <vector>

#include <nlohmann/json.hpp>

namespace {

using nlohmann::json;

struct row {
  std::string name, unit, kind, peer;
  double value = 0, ratio = 0, noise = 0;
};

/// The middle of what the processes of one program found. Its noise is theirs, or half the distance of the
/// processes beside the middle ones, whichever is more.
row median_of(std::vector<row> all) {
  std::sort(all.begin(), all.end(), [](row const& a, row const& b) { return a.ratio < b.ratio; });
  auto const middle = all.size() / 2, low = middle / 2, high = all.size() - 1 - low;
  auto result = all[middle];
  result.noise = std::max(result.noise, (all[high].ratio - all[low].ratio) / 2);
  return result;
}

std::vector<row> read_rows(std::filesystem::path const& folder) {
  std::vector<std::vector<row>> found; // by name, in the order of the files
  std::map<std::string, std::size_t> place;
  std::vector<std::filesystem::path> files;
  for (auto const& entry : std::filesystem::directory_iterator(folder)) files.push_back(entry.path());
  std::sort(files.begin(), files.end());
  for (auto const& file : files) {
    std::ifstream in(file);
    auto const document = json::parse(in);
    for (auto const& b : document.at("benchmarks")) {
      if (b.contains("error_occurred") && b.at("error_occurred").get<bool>())
        throw std::runtime_error(b.at("name").get<std::string>() + ": " + b.value("error_message", ""));
      if (b.value("run_type", "iteration") != "iteration" || !b.contains("ratio")) continue;
      auto const label = b.at("label").get<std::string>();
      auto const bar = label.find('|');
      auto name = b.at("name").get<std::string>();
      for (std::string_view tail : {"/manual_time", "/process_time", "/real_time"})
        if (name.ends_with(tail)) name.resize(name.size() - tail.size());
      if (auto const at = name.find("/iterations:"); at != std::string::npos) name.resize(at);
      auto const at = place.try_emplace(name, found.size()).first->second;
      if (at == found.size()) found.emplace_back();
      found[at].push_back({name, b.at("time_unit"), label.substr(0, bar), label.substr(bar + 1),
                           b.at("real_time"), b.at("ratio"), b.value("noise", 0.0)});
    }
  }
  std::vector<row> rows;
  for (auto& processes : found) rows.push_back(median_of(std::move(processes)));
  return rows;
}

std::string fixed(double value, int digits) {
  std::ostringstream text;
  text.setf(std::ios::fixed);
  text.precision(digits);
  text << value;
  return text.str();
}

std::string escaped(std::string const& text) {
  std::string result;
  for (char c : text) {
    if (c == '<')
      result += "&lt;";
    else if (c == '>')
      result += "&gt;";
    else if (c == '&')
      result += "&amp;";
    else
      result += c;
  }
  return result;
}

constexpr char const* meaning[] = {"share of the limit, 1 is the limit, more is better",
                                   "time over the peer's time, 1 is level, less is better"};

void write_table(std::filesystem::path const& file, std::vector<row> const& rows) {
  std::ofstream out(file);
  out << "Medians of ratios of times taken by turns in one process, with half the width of their 95% "
         "intervals; on ranks the median of several processes, with their spread; absolute times are this "
         "machine's and today's.\n";
  for (bool share : {true, false}) {
    bool any = false;
    for (auto const& r : rows) {
      if ((r.kind == "share_of_limit") != share) continue;
      if (!any)
        out << "\n### " << (share ? "Against the machine: " : "Against a peer: ") << meaning[share ? 0 : 1]
            << "\n\n| benchmark | ratio | noise | " << (share ? "limit" : "peer")
            << " | time |\n|---|---|---|---|---|\n";
      any = true;
      out << "| " << r.name << " | " << fixed(r.ratio, 3) << " | ±" << fixed(r.noise, 3) << " | " << r.peer
          << " | " << fixed(r.value, 3) << " " << r.unit << " |\n";
    }
  }
  if (!out.flush()) throw std::runtime_error("cannot write " + file.string());
}

void write_bars(std::filesystem::path const& file, std::vector<row> const& rows) {
  constexpr int line = 20, left = 330, width = 420;
  int const height = 64 + line * static_cast<int>(rows.size());
  std::ofstream out(file);
  out << "<svg xmlns='http://www.w3.org/2000/svg' width='" << left + width + 90 << "' height='" << height
      << "' font-family='sans-serif' font-size='12'>\n<rect width='100%' height='100%' fill='white'/>\n"
      << "<text x='12' y='22' font-size='15' font-weight='bold'>Tessera beside its limits and peers</text>\n"
      << "<text x='12' y='40' fill='#555'><tspan fill='#2a7f62'>■</tspan> share of the machine's limit (more "
         "is "
         "better)   <tspan fill='#3b6ea8'>■</tspan> time over the peer's (less is better)</text>\n";
  auto const scale = [&](double ratio) { return width * std::min(ratio, 2.0) / 2.0; };
  int y = 54;
  for (auto const& r : rows) {
    bool const share = r.kind == "share_of_limit";
    out << "<text x='" << left - 8 << "' y='" << y + 13 << "' text-anchor='end'>" << escaped(r.name)
        << "</text>"
        << "<rect x='" << left << "' y='" << y + 3 << "' width='" << fixed(scale(r.ratio), 1)
        << "' height='13' rx='2' fill='" << (share ? "#2a7f62" : "#3b6ea8") << "'/>"
        << "<text x='" << fixed(left + scale(r.ratio) + 6, 1) << "' y='" << y + 13 << "'>"
        << fixed(r.ratio, 2) << "</text>\n";
    y += line;
  }
  out << "<line x1='" << left + width / 2 << "' x2='" << left + width / 2 << "' y1='50' y2='" << y + 4
      << "' stroke='#999' stroke-dasharray='3 3'/>\n</svg>\n";
  if (!out.flush()) throw std::runtime_error("cannot write " + file.string());
}

} // namespace

int main(int argc, char** argv) try {
  if (argc != 2) {
    std::cerr << "usage: report DIR   (DIR/raw holds the benchmarks' JSON)\n";
    return 2;
  }
  std::filesystem::path const folder = argv[1];
  auto const rows = read_rows(folder / "raw");
  if (rows.empty()) throw std::runtime_error("no benchmark printed a ratio");
  json list = json::array();
  for (auto const& r : rows)
    list.push_back({{"name", r.name},
                    {"value", r.value},
                    {"unit", r.unit},
                    {"kind", r.kind},
                    {"peer", r.peer},
                    {"ratio", r.ratio},
                    {"noise", r.noise}});
  std::ofstream out(folder / "report.json");
  out << list.dump(2) << '\n';
  if (!out.flush()) throw std::runtime_error("cannot write report.json");
  write_table(folder / "report.md", rows);
  write_bars(folder / "report.svg", rows);
} catch (std::exception const& failure) {
  std::cerr << "report: " << failure.what() << '\n';
  return 1;
}
