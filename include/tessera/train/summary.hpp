/// What a run leaves to be read: `summary.json`, and a table of memory by kind beside what the formula of
/// ZeRO (Rajbhandari et al., 2020) says it must be.
///
///     auto const expected =
///         zero_formula(parameters, {.ranks = 2, .zero = 1, .weight_bytes = 2, .state_bytes = 12});
///     std::puts(memory_table(peaks, expected).c_str());
#ifndef TESSERA_TRAIN_SUMMARY_HPP
#define TESSERA_TRAIN_SUMMARY_HPP

#include <array>
#include <cstdio>
#include <string>

#include <tessera/parallel/memory_plan.hpp>

namespace tessera::inline TESSERA_ABI::train {

/// Bytes of each kind of memory, in the order of memory_kind.
using bytes_by_kind = std::array<index_t, memory_kind_count>;

inline bytes_by_kind peaks_of(memory_meter const& meter) {
  bytes_by_kind peaks{};
  for (int kind = 0; kind < memory_kind_count; ++kind)
    peaks[static_cast<std::size_t>(kind)] = meter.peak(static_cast<memory_kind>(kind));
  return peaks;
}

/// The formula by kind, for `elements` parameters: the optimizer's state is divided by the ranks from stage 1
/// on, the gradients from stage 2 on, the weights at stage 3. Kinds that the formula does not speak of are
/// -1.
inline bytes_by_kind zero_formula(index_t elements, parallel::memory_plan_options const& o) {
  bytes_by_kind bytes;
  bytes.fill(-1);
  auto const at = [&](memory_kind kind) -> index_t& { return bytes[static_cast<std::size_t>(kind)]; };
  auto const share = [&](int from) { return o.zero >= from ? o.ranks : 1; };
  at(memory_kind::parameters) = elements * o.weight_bytes / share(3);
  at(memory_kind::gradients) = elements * o.gradient_bytes / share(2);
  at(memory_kind::optimizer_state) = elements * o.state_bytes / share(1);
  return bytes;
}

inline std::string mebibytes_text(index_t bytes) {
  char text[32];
  std::snprintf(text, sizeof text, "%.2f MiB", static_cast<double>(bytes) / 1048576.0);
  return bytes < 0 ? "" : text;
}

/// Lines of "kind, peak bytes of the fullest rank, formula".
inline std::string memory_table(bytes_by_kind const& peaks, bytes_by_kind const& formula) {
  char line[128];
  std::snprintf(line, sizeof line, "%-16s %14s %14s\n", "memory, a rank", "peak", "ZeRO formula");
  std::string table = line;
  index_t total = 0;
  for (std::size_t kind = 0; kind < peaks.size(); ++kind) {
    if (peaks[kind] == 0 && formula[kind] <= 0) continue;
    std::snprintf(line, sizeof line, "%-16s %14s %14s\n", name_of(static_cast<memory_kind>(kind)),
                  mebibytes_text(peaks[kind]).c_str(), mebibytes_text(formula[kind]).c_str());
    table += line;
    total += peaks[kind];
  }
  std::snprintf(line, sizeof line, "%-16s %14s\n", "sum", mebibytes_text(total).c_str());
  return table + line;
}

} // namespace tessera::inline TESSERA_ABI::train

#endif
