// requires: mpi
// Each collective of comm::mpi beside the bare MPI call on the same buffers, and the price of summing in rank
// order beside the MPI library's own reduction. Run under mpiexec; every rank runs the same fixed number of
// turns.
#include <mpi.h>

#include <tessera/comm/mpi.hpp>

#include "support/measure.hpp"

namespace {

using namespace tessera;

constexpr index_t sizes_in_bytes[] = {4 << 10, 64 << 10, 1 << 20, 16 << 20};

/// Calls in one timed turn: enough that the clock's grain and a single late rank do not show.
index_t calls_of(index_t bytes) {
  return std::max<index_t>(1, (256 << 10) / bytes);
}
index_t turns_of(index_t bytes) {
  return bytes <= (1 << 20) ? 300 : 40;
}

template <class Ours, class Peer>
void compare(benchmark::State& state, index_t bytes, std::string const& peer, Ours ours, Peer bare) {
  auto const repeat = [&](auto& f) {
    return [&f, bytes] {
      for (index_t i = 0; i < calls_of(bytes); ++i) f();
    };
  };
  // A barrier before each turn: a rank that comes late from the other's turn must not count as its cost.
  auto a = repeat(ours), b = repeat(bare);
  bench::pairs times;
  a();
  b();
  bool ours_first = true;
  for (auto _ : state) {
    double seconds[2];
    for (int turn = 0; turn < 2; ++turn) {
      bool const mine = (turn == 0) == ours_first;
      MPI_Barrier(MPI_COMM_WORLD);
      seconds[mine ? 0 : 1] = mine ? bench::seconds_of(a) : bench::seconds_of(b);
    }
    ours_first = !ours_first;
    times.ours.push_back(seconds[0]);
    times.peer.push_back(seconds[1]);
    state.SetIterationTime(seconds[0] / static_cast<double>(calls_of(bytes)));
  }
  bench::publish(state, times, "times_peer", peer);
}

void add(char const* name, index_t bytes, int ranks, auto body) {
  auto const title = "comm/mpi/" + std::string(name) + "/ranks:" + std::to_string(ranks) +
                     "/KiB:" + std::to_string(bytes >> 10);
  benchmark::RegisterBenchmark(title.c_str(), body)->UseManualTime()->Iterations(turns_of(bytes));
}

void register_all(comm::mpi& ranks) {
  for (auto const bytes : sizes_in_bytes) {
    auto const n = bytes / 4;
    auto const size = index_t{ranks.size()};
    auto const part = narrow<int>(n / size);
    auto const whole = narrow<int>(n);
    comm::reduce_options const native{.order = comm::summation::native};

    add("broadcast", bytes, ranks.size(), [=, &ranks](benchmark::State& state) {
      std::vector<float> x(static_cast<std::size_t>(n), 1.0f);
      compare(
          state, bytes, "MPI_Bcast", [&] { ranks.broadcast(std::span(x), 0); },
          [&] { MPI_Bcast(x.data(), whole, MPI_FLOAT, 0, MPI_COMM_WORLD); });
    });
    add("all_reduce_native", bytes, ranks.size(), [=, &ranks](benchmark::State& state) {
      std::vector<float> x(static_cast<std::size_t>(n), 1.0f), y(x.size());
      compare(
          state, bytes, "MPI_Allreduce",
          [&] { ranks.all_reduce(std::span(y), std::span<float const>(x), native); },
          [&] { MPI_Allreduce(x.data(), y.data(), whole, MPI_FLOAT, MPI_SUM, MPI_COMM_WORLD); });
    });
    add("reduce_scatter_native", bytes, ranks.size(), [=, &ranks](benchmark::State& state) {
      std::vector<float> x(static_cast<std::size_t>(part * size), 1.0f), y(static_cast<std::size_t>(part));
      compare(
          state, bytes, "MPI_Reduce_scatter_block",
          [&] { ranks.reduce_scatter(std::span(y), std::span<float const>(x), native); },
          [&] { MPI_Reduce_scatter_block(x.data(), y.data(), part, MPI_FLOAT, MPI_SUM, MPI_COMM_WORLD); });
    });
    add("all_gather", bytes, ranks.size(), [=, &ranks](benchmark::State& state) {
      std::vector<float> x(static_cast<std::size_t>(part), 1.0f), y(static_cast<std::size_t>(part * size));
      compare(
          state, bytes, "MPI_Allgather", [&] { ranks.all_gather(std::span(y), std::span<float const>(x)); },
          [&] { MPI_Allgather(x.data(), part, MPI_FLOAT, y.data(), part, MPI_FLOAT, MPI_COMM_WORLD); });
    });
    add("all_to_all", bytes, ranks.size(), [=, &ranks](benchmark::State& state) {
      std::vector<float> x(static_cast<std::size_t>(part * size), 1.0f), y(x.size());
      compare(
          state, bytes, "MPI_Alltoall", [&] { ranks.all_to_all(std::span(y), std::span<float const>(x)); },
          [&] { MPI_Alltoall(x.data(), part, MPI_FLOAT, y.data(), part, MPI_FLOAT, MPI_COMM_WORLD); });
    });
    add("all_reduce_rank_order", bytes, ranks.size(), [=, &ranks](benchmark::State& state) {
      std::vector<float> x(static_cast<std::size_t>(n), 1.0f), y(x.size());
      compare(
          state, bytes, "all_reduce native",
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
  int count = narrow<int>(arguments.size());
  arguments.push_back(nullptr);
  benchmark::Initialize(&count, arguments.data());
  register_all(ranks);
  if (ranks.rank() == 0) {
    benchmark::RunSpecifiedBenchmarks();
  } else {
    silent nothing;
    benchmark::RunSpecifiedBenchmarks(&nothing);
  }
}
