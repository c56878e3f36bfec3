/// How every benchmark here gets its figure: what is measured and what it is compared with run by turns in
/// one process, so that a noisy machine disturbs both alike. The figure is the median of the ratios of
/// neighbouring turns; its noise is half the width of the median's 95% confidence interval.
#ifndef TESSERA_BENCH_SUPPORT_MEASURE_HPP
#define TESSERA_BENCH_SUPPORT_MEASURE_HPP

#include <algorithm>
#include <chrono>
#include <cmath>
#include <string>
#include <vector>

#include <benchmark/benchmark.h>

#include <tessera/core/tensor.hpp>
#include <tessera/exec/host.hpp>

namespace bench {

using tessera::index_t;

template <class F>
double seconds_of(F&& f) {
  auto const start = std::chrono::steady_clock::now();
  f();
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
}

inline double quantile(std::vector<double> values, double at) {
  if (values.empty()) return 0;
  auto const k = static_cast<std::ptrdiff_t>(at * static_cast<double>(values.size() - 1));
  std::nth_element(values.begin(), values.begin() + k, values.end());
  return values[static_cast<std::size_t>(k)];
}

/// Times of alternating runs.
struct pairs {
  std::vector<double> ours, peer;

  std::vector<double> ratios() const {
    std::vector<double> result;
    for (std::size_t i = 0; i < ours.size(); ++i) result.push_back(ours[i] / peer[i]);
    return result;
  }
  double ratio() const { return quantile(ratios(), 0.5); }
  /// Half the distance of the order statistics that enclose the median with 95% probability, whatever the
  /// distribution (the binomial's normal approximation: n / 2 less and plus 0.98 root n).
  double noise() const {
    auto const half = 0.98 / std::sqrt(static_cast<double>(std::max<std::size_t>(ours.size(), 1)));
    return (quantile(ratios(), std::min(1.0, 0.5 + half)) - quantile(ratios(), std::max(0.0, 0.5 - half))) /
           2;
  }
};

/// Runs `ours` and `peer` by turns for as long as the benchmark library asks, and five times at least.
template <class Ours, class Peer>
pairs run_by_turns(benchmark::State& state, Ours&& ours, Peer&& peer) {
  pairs times;
  ours();
  peer();
  for (auto _ : state) {
    times.ours.push_back(seconds_of(ours));
    times.peer.push_back(seconds_of(peer));
    state.SetIterationTime(times.ours.back());
  }
  // What takes longer than the library wanted to spend was called once: too seldom for a median.
  while (times.ours.size() < 5) {
    times.ours.push_back(seconds_of(ours));
    times.peer.push_back(seconds_of(peer));
  }
  return times;
}

/// What the report needs to know of a figure: `times_peer` (time over the peer's time; 1 is level, less is
/// faster) or `share_of_limit` (1 is the limit).
inline void publish(benchmark::State& state, pairs const& times, std::string const& kind,
                    std::string const& peer, double work_ratio = 1) {
  bool const share = kind == "share_of_limit";
  auto const ratio = times.ratio();
  state.counters["ratio"] = share ? work_ratio / ratio : ratio / work_ratio;
  state.counters["noise"] = times.noise() / ratio * state.counters["ratio"];
  state.SetLabel(kind + "|" + peer);
}

/// Time beside that of a peer that does the same work.
template <class Ours, class Peer>
void against_peer(benchmark::State& state, std::string const& peer_name, Ours&& ours, Peer&& peer) {
  auto const times = run_by_turns(state, ours, peer);
  publish(state, times, "times_peer", peer_name);
}

/// The machine's bandwidth as everybody counts it: a[i] = b[i] + s * c[i], three arrays, each byte once.
class triad {
public:
  triad(tessera::exec::host& ex, index_t bytes)
      : ex_(ex), a_({std::max<index_t>(bytes / 12, 16)}), b_(a_.extents()), c_(a_.extents()) {}

  void operator()() {
    auto *a = a_.data(), *b = b_.data(), *c = c_.data();
    ex_.parallel_for(a_.size(), 4096, [=](index_t begin, index_t end) {
      TESSERA_SIMD()
      for (index_t i = begin; i < end; ++i) a[i] = b[i] + 3.0f * c[i];
    });
    benchmark::ClobberMemory();
  }
  double bytes() const { return 12.0 * static_cast<double>(a_.size()); }

private:
  tessera::exec::host& ex_;
  tessera::tensor<float, 1> a_, b_, c_;
};

/// Bandwidth of `ours`, which moves `bytes`, as a share of the triad's over as many bytes.
template <class Ours>
void against_triad(benchmark::State& state, tessera::exec::host& ex, double bytes, Ours&& ours) {
  triad limit(ex, static_cast<index_t>(bytes));
  auto const times = run_by_turns(state, ours, limit);
  publish(state, times, "share_of_limit", "triad bandwidth", bytes / limit.bytes());
  state.counters["bytes"] = bytes;
}

} // namespace bench

#endif
