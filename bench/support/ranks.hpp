/// Benchmarks that run under mpiexec: all ranks measure by turns in step, rank 0 reports.
#ifndef TESSERA_BENCH_SUPPORT_RANKS_HPP
#define TESSERA_BENCH_SUPPORT_RANKS_HPP

#include <string_view>

#include <tessera/comm/mpi.hpp>

#include "support/measure.hpp"

namespace bench {

/// What rank 0 says. Ranks that timed for themselves would disagree on how often to call.
template <class Value>
Value agreed(Value value) {
  MPI_Bcast(&value, sizeof value, MPI_BYTE, 0, MPI_COMM_WORLD);
  return value;
}

template <class F>
double seconds_of_calls(F&& f, index_t calls) {
  // A barrier first: a rank that comes late from the other's turn must not count as its cost.
  MPI_Barrier(MPI_COMM_WORLD);
  return seconds_of([&] {
    for (index_t i = 0; i < calls; ++i) f();
  });
}

/// Seconds that each comparison may take, all its turns together: --benchmark_min_time, four times.
inline double seconds_to_spend(int argc, char** argv) {
  for (int i = 1; i < argc; ++i)
    if (constexpr std::string_view name = "--benchmark_min_time=";
        std::string_view(argv[i]).starts_with(name))
      return 4 * std::stod(std::string(std::string_view(argv[i]).substr(name.size())));
  return 2;
}

/// `ours` and `peer` by turns on all ranks, each turn as many calls as fill half a millisecond. Where a rank
/// of ours has but a part of the peer's work, `work_ratio` is that part.
template <class Ours, class Peer>
void by_turns_on_ranks(benchmark::State& state, double seconds, std::string const& name, Ours ours, Peer peer,
                       double work_ratio = 1) {
  pairs times;
  for (auto _ : state) {
    seconds_of_calls(ours, 4);
    auto const one = agreed(seconds_of_calls(peer, 16) / 16);
    auto const calls = std::clamp<index_t>(static_cast<index_t>(5e-4 / one), 1, 1000);
    auto const per_turn = 2 * one * static_cast<double>(calls);
    auto const turns = std::clamp<index_t>(static_cast<index_t>(seconds / per_turn), 8, 4000);
    for (index_t turn = 0; turn < turns; ++turn) {
      bool const ours_first = turn % 2 == 0;
      if (ours_first) times.ours.push_back(seconds_of_calls(ours, calls));
      times.peer.push_back(seconds_of_calls(peer, calls));
      if (!ours_first) times.ours.push_back(seconds_of_calls(ours, calls));
    }
    state.SetIterationTime(quantile(times.ours, 0.5) / static_cast<double>(calls));
  }
  publish(state, times, "times_peer", name, work_ratio);
}

/// A benchmark that all ranks run once: its body makes its own turns.
inline void register_on_ranks(std::string const& title, auto body) {
  benchmark::RegisterBenchmark(title.c_str(), body)->UseManualTime()->Iterations(1);
}

/// The main function: `register_all(ranks, seconds)` registers (what it returns lives until all have run),
/// rank 0 prints, the others measure along.
template <class Register>
void run_on_ranks(int argc, char** argv, Register register_all) {
  /// Ranks other than the first measure along and print nothing.
  struct silent : benchmark::BenchmarkReporter {
    bool ReportContext(Context const&) override { return true; }
    void ReportRuns(std::vector<Run> const&) override {}
  };
  tessera::comm::mpi_environment environment(argc, argv);
  tessera::comm::mpi ranks(MPI_COMM_WORLD);
  std::vector<char*> arguments(argv, argv + argc);
  if (ranks.rank() != 0)
    std::erase_if(arguments,
                  [](char const* a) { return std::string_view(a).starts_with("--benchmark_out"); });
  auto const seconds = seconds_to_spend(argc, argv);
  int count = tessera::narrow<int>(arguments.size());
  arguments.push_back(nullptr);
  benchmark::Initialize(&count, arguments.data());
  [[maybe_unused]] auto const kept = register_all(ranks, seconds);
  if (ranks.rank() == 0) {
    benchmark::RunSpecifiedBenchmarks();
  } else {
    silent nothing;
    benchmark::RunSpecifiedBenchmarks(&nothing);
  }
}

} // namespace bench

#endif
