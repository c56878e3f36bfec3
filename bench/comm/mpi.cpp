// requires: mpi
// smoke: KiB:4/
// Each collective of comm::mpi beside the bare MPI call on the same buffers, and the price of summing in rank
// order beside the MPI library's own reduction. A bare call beside itself on one more communicator says what
// level looks like. Run under mpiexec.
#include <array>
#include <utility>

#include <mpi.h>

#include <tessera/comm/mpi.hpp>

#include "support/ranks.hpp"

namespace {

using namespace tessera;

constexpr index_t sizes_in_bytes[] = {4 << 10, 64 << 10, 1 << 20, 16 << 20};

void add(char const* name, index_t bytes, int ranks, auto body) {
  bench::register_on_ranks("comm/mpi/" + std::string(name) + "/ranks:" + std::to_string(ranks) +
                               "/KiB:" + std::to_string(bytes >> 10),
                           body);
}

void register_all(comm::mpi& ranks, MPI_Comm bare, MPI_Comm other, double seconds) {
  auto const compare = [seconds](benchmark::State& state, char const* peer_name, auto ours, auto peer) {
    bench::by_turns_on_ranks(state, seconds, peer_name, ours, peer);
  };
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
    add("bare_all_reduce", bytes, ranks.size(), [=](benchmark::State& state) {
      std::vector<float> x(static_cast<std::size_t>(n), 1.0f), y(x.size());
      compare(
          state, "MPI_Allreduce",
          [&] { MPI_Allreduce(x.data(), y.data(), whole, MPI_FLOAT, MPI_SUM, other); },
          [&] { MPI_Allreduce(x.data(), y.data(), whole, MPI_FLOAT, MPI_SUM, bare); });
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

/// A communicator of its own, as the wrapper has one, for what the library itself makes of that.
class duplicate {
public:
  duplicate() { MPI_Comm_dup(MPI_COMM_WORLD, &comm_); }
  duplicate(duplicate&& from) noexcept : comm_(std::exchange(from.comm_, MPI_COMM_NULL)) {}
  duplicate& operator=(duplicate&&) = delete;
  ~duplicate() {
    if (comm_ != MPI_COMM_NULL) MPI_Comm_free(&comm_);
  }
  MPI_Comm get() const noexcept { return comm_; }

private:
  MPI_Comm comm_ = MPI_COMM_NULL;
};

} // namespace

int main(int argc, char** argv) {
  bench::run_on_ranks(argc, argv, [](comm::mpi& ranks, double seconds) {
    std::array<duplicate, 2> bare;
    register_all(ranks, bare[0].get(), bare[1].get(), seconds);
    return bare;
  });
}
