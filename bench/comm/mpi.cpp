// requires: mpi
// Each collective of comm::mpi beside the bare MPI call on the same buffers, and the price of summing in rank
// order beside the MPI library's own reduction. Run under mpiexec.
#include <mpi.h>

#include <tessera/comm/mpi.hpp>

#include "support/measure.hpp"

namespace {

using namespace tessera;

constexpr index_t sizes_in_bytes[] = {4 << 10, 64 << 10, 1 << 20, 16 << 20};

/// Seconds that each comparison may take, all its turns together: --benchmark_min_time, four times.
double seconds_to_spend = 2;

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
  return bench::seconds_of([&] {
    for (index_t i = 0; i < calls; ++i) f();
  });
}

/// The wrapper and the bare call by turns, each turn as many calls as fill half a millisecond.
template <class Ours, class Peer>
void compare(benchmark::State& state, std::string const& name, Ours ours, Peer peer) {
  bench::pairs times;
  for (auto _ : state) {
    seconds_of_calls(ours, 4);
    auto const one = agreed(seconds_of_calls(peer, 16) / 16);
    auto const calls = std::clamp<index_t>(static_cast<index_t>(5e-4 / one), 1, 1000);
    auto const per_turn = 2 * one * static_cast<double>(calls);
    auto const turns = std::clamp<index_t>(static_cast<index_t>(seconds_to_spend / per_turn), 8, 4000);
    for (index_t turn = 0; turn < turns; ++turn) {
      bool const ours_first = turn % 2 == 0;
      if (ours_first) times.ours.push_back(seconds_of_calls(ours, calls));
      times.peer.push_back(seconds_of_calls(peer, calls));
      if (!ours_first) times.ours.push_back(seconds_of_calls(ours, calls));
    }
    state.SetIterationTime(bench::quantile(times.ours, 0.5) / static_cast<double>(calls));
  }
  bench::publish(state, times, "times_peer", name);
}

void add(char const* name, index_t bytes, int ranks, auto body) {
  auto const title = "comm/mpi/" + std::string(name) + "/ranks:" + std::to_string(ranks) +
                     "/KiB:" + std::to_string(bytes >> 10);
  benchmark::RegisterBenchmark(title.c_str(), body)->UseManualTime()->Iterations(1);
}

void register_all(comm::mpi& ranks, MPI_Comm bare) {
  for (auto const bytes : sizes_in_bytes) {
    auto const n = bytes / 4;
    auto const size = index_t{ranks.size()};
    auto const part = narrow<int>(n / size);
    auto const whole = narrow<int>(n);
    comm::reduce_options const native{.order = comm::summation::native};

    add("broadcast", bytes, ranks.size(), [=, &ranks](benchmark::State& state) {
      std::vector<float> x(static_cast<std::size_t>(n), 1.0f);
      compare(
          state, "MPI_Bcast", [&] { ranks.broadcast(std::span(x), 0); },
          [&] { MPI_Bcast(x.data(), whole, MPI_FLOAT, 0, bare); });
    });
    add("all_reduce_native", bytes, ranks.size(), [=, &ranks](benchmark::State& state) {
      std::vector<float> x(static_cast<std::size_t>(n), 1.0f), y(x.size());
      compare(
          state, "MPI_Allreduce", [&] { ranks.all_reduce(std::span(y), std::span<float const>(x), native); },
          [&] { MPI_Allreduce(x.data(), y.data(), whole, MPI_FLOAT, MPI_SUM, bare); });
    });
    add("reduce_scatter_native", bytes, ranks.size(), [=, &ranks](benchmark::State& state) {
      std::vector<float> x(static_cast<std::size_t>(part * size), 1.0f), y(static_cast<std::size_t>(part));
      compare(
          state, "MPI_Reduce_scatter_block",
          [&] { ranks.reduce_scatter(std::span(y), std::span<float const>(x), native); },
          [&] { MPI_Reduce_scatter_block(x.data(), y.data(), part, MPI_FLOAT, MPI_SUM, bare); });
    });
    add("all_gather", bytes, ranks.size(), [=, &ranks](benchmark::State& state) {
      std::vector<float> x(static_cast<std::size_t>(part), 1.0f), y(static_cast<std::size_t>(part * size));
      compare(
          state, "MPI_Allgather", [&] { ranks.all_gather(std::span(y), std::span<float const>(x)); },
          [&] { MPI_Allgather(x.data(), part, MPI_FLOAT, y.data(), part, MPI_FLOAT, bare); });
    });
    add("all_to_all", bytes, ranks.size(), [=, &ranks](benchmark::State& state) {
      std::vector<float> x(static_cast<std::size_t>(part * size), 1.0f), y(x.size());
      compare(
          state, "MPI_Alltoall", [&] { ranks.all_to_all(std::span(y), std::span<float const>(x)); },
          [&] { MPI_Alltoall(x.data(), part, MPI_FLOAT, y.data(), part, MPI_FLOAT, bare); });
    });
    add("all_reduce_rank_order", bytes, ranks.size(), [=, &ranks](benchmark::State& state) {
      std::vector<float> x(static_cast<std::size_t>(n), 1.0f), y(x.size());
      compare(
          state, "all_reduce native",
          [&] { ranks.all_reduce(std::span(y), std::span<float const>(x), comm::reduce_options{}); },
          [&] { ranks.all_reduce(std::span(y), std::span<float const>(x), native); });
    });
  }
}

/// Ranks other than the first measure along and print nothing.
class silent : public benchmark::BenchmarkReporter {
public:
  bool ReportContext(Context const&) override { return true; }
  void ReportRuns(std::vector<Run> const&) override {}
};

} // namespace

int main(int argc, char** argv) {
  comm::mpi_environment environment(argc, argv);
  comm::mpi ranks(MPI_COMM_WORLD);
  std::vector<char*> arguments(argv, argv + argc);
  if (ranks.rank() != 0)
    std::erase_if(arguments,
                  [](char const* a) { return std::string_view(a).starts_with("--benchmark_out"); });
  for (std::string_view const flag : arguments)
    if (constexpr std::string_view name = "--benchmark_min_time="; flag.starts_with(name))
      seconds_to_spend = 4 * std::stod(std::string(flag.substr(name.size())));
  int count = narrow<int>(arguments.size());
  arguments.push_back(nullptr);
  benchmark::Initialize(&count, arguments.data());
  // The wrapper has a communicator of its own; so has the bare call, for what the library itself makes of
  // that.
  MPI_Comm bare = MPI_COMM_NULL;
  MPI_Comm_dup(MPI_COMM_WORLD, &bare);
  register_all(ranks, bare);
  if (ranks.rank() == 0) {
    benchmark::RunSpecifiedBenchmarks();
  } else {
    silent nothing;
    benchmark::RunSpecifiedBenchmarks(&nothing);
  }
  MPI_Comm_free(&bare);
}
