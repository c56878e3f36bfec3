// requires: mpi
// A redistribution beside the bare collective on the same buffers and the same communicator: what choosing,
// checking and cutting cost. Run under mpiexec.
#include <tessera/partition/redistribute.hpp>

#include "support/ranks.hpp"

namespace {

using namespace tessera;
using namespace tessera::partition;

constexpr index_t sizes_in_bytes[] = {4 << 10, 64 << 10, 1 << 20, 16 << 20};

template <class P>
using over_tensor = partitioned_tensor<float, 2, host_memory, placed<axis::tensor, P>>;

/// Redistributes [ranks, n] from From to To by turns with `bare(out, in)` on the tensors' memory.
template <class From, class To, class Bare>
void add(comm::mpi& ranks, double seconds, index_t bytes, std::string const& name, Bare bare) {
  auto const title = "partition/redistribute/" + name + "/ranks:" + std::to_string(ranks.size()) +
                     "/KiB:" + std::to_string(bytes >> 10);
  bench::register_on_ranks(title, [=, &ranks](benchmark::State& state) {
    exec::host ex({.threads = 1});
    mesh on(ranks, {.tensor = ranks.size()});
    extents<2> const whole{ranks.size(), bytes / 4 / ranks.size()};
    over_tensor<From> x(on.place(), whole);
    over_tensor<To> y(on.place(), whole);
    auto const out = std::span(y.local().data(), static_cast<std::size_t>(y.local().size()));
    auto const in = std::span<float const>(x.local().data(), static_cast<std::size_t>(x.local().size()));
    redistribute_options const how{.order = comm::summation::native};
    bench::by_turns_on_ranks(
        state, seconds, "the bare collective", [&] { redistribute(ex, on, y, x, how); },
        [&] { bare(ranks, out, in); });
  });
}

void register_all(comm::mpi& ranks, double seconds) {
  comm::reduce_options const native{.order = comm::summation::native};
  for (auto const bytes : sizes_in_bytes) {
    add<partial<>, invariant>(ranks, seconds, bytes, "all_reduce",
                              [=](auto& comm, auto out, auto in) { comm.all_reduce(out, in, native); });
    add<partial<>, shard<0>>(ranks, seconds, bytes, "reduce_scatter",
                             [=](auto& comm, auto out, auto in) { comm.reduce_scatter(out, in, native); });
    add<shard<0>, replicate>(ranks, seconds, bytes, "all_gather",
                             [](auto& comm, auto out, auto in) { comm.all_gather(out, in); });
    add<shard<1>, shard<0>>(ranks, seconds, bytes, "all_to_all",
                            [](auto& comm, auto out, auto in) { comm.all_to_all(out, in); });
  }
}

} // namespace

int main(int argc, char** argv) {
  bench::run_on_ranks(argc, argv, [](comm::mpi& ranks, double seconds) {
    register_all(ranks, seconds);
    return 0;
  });
}
