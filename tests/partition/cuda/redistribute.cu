// requires: nccl
// Redistributions in device memory over NCCL: the host's code with another space.
#include <tessera/partition/redistribute.hpp>

#include <tessera/comm/cuda/nccl.cuh>
#include <tessera/exec/copy_cuda.hpp>

#include "partition/fixture.hpp"
#include "support/devices.hpp"

using namespace tessera;
using namespace tessera::partition;
using test::laid_out;
using test::numbers;

namespace {

using test::ranks_here;

template <class T>
numbers carried(exec::cuda& ex, mesh<comm::nccl>& on, laid_out const& from, laid_out const& to,
                numbers const& input, bool blocking) {
  auto const steps = cheapest_steps(from.parts, to.parts);
  tensor<T, 1> host_in({static_cast<index_t>(input.size())});
  tensor<T, 1> host_out({static_cast<index_t>(to.elements(on.rank()).size())});
  for (std::size_t i = 0; i < input.size(); ++i) host_in.data()[i] = T(static_cast<float>(input[i]));
  tensor<T, 1, exec::cuda_memory> in(host_in.extents()), out(host_out.extents());
  exec::copy(ex, in.view(), host_in.view());
  partition::detail::journey<exec::cuda, comm::nccl, T, 2> way(ex, on,
                                                               {.to = out.data(),
                                                                .from = in.data(),
                                                                .whole = {from.rows, from.columns},
                                                                .before = from.parts,
                                                                .steps = &steps,
                                                                .where = site::here()});
  if (blocking) {
    way.run();
  } else {
    way.start();
    way.wait();
  }
  exec::copy(ex, host_out.view(), out.view());
  return {host_out.data(), host_out.data() + host_out.size()};
}

} // namespace

TEST_CASE("every pair of placements in device memory, blocking and as requests") {
  placement const each[] = {replicate::value, invariant::value, shard<0>::value, shard<1>::value,
                            partial<>::value};
  for (int const wanted : {1, 3}) {
    auto const ranks = ranks_here(wanted);
    if (ranks < wanted) continue;
    layout::mesh_shape const shape{.tensor = ranks};
    std::vector<std::pair<laid_out, laid_out>> pairs;
    for (auto const& a : each)
      for (auto const& b : each)
        pairs.push_back({{{{axis::tensor}, {a}, 1}, shape, 5, 3}, {{{axis::tensor}, {b}, 1}, shape, 5, 3}});
    auto const whole = test::whole_values(15);
    std::vector<std::vector<numbers>> values(2 * pairs.size());
    for (auto& one : values) one.resize(static_cast<std::size_t>(ranks));
    comm::run_threads(ranks,
                      [&](comm::threads& threads) {
                        exec::cuda ex({.device = threads.rank()});
                        comm::nccl world(threads, ex, {.stall_limit = 20});
                        mesh on(world, shape);
                        auto const me = static_cast<std::size_t>(threads.rank());
                        for (std::size_t p = 0; p < pairs.size(); ++p) {
                          auto const& [from, to] = pairs[p];
                          auto const input = from.spread(whole)[me];
                          values[2 * p][me] = carried<float>(ex, on, from, to, input, true);
                          values[2 * p + 1][me] = carried<bf16>(ex, on, from, to, input, false);
                        }
                      },
                      {.stall_limit = 20});
    for (std::size_t p = 0; p < pairs.size(); ++p) {
      CAPTURE(text_of(pairs[p].first.parts));
      CAPTURE(text_of(pairs[p].second.parts));
      test::check_value(pairs[p].second, values[2 * p], whole);
      test::check_value(pairs[p].second, values[2 * p + 1], whole);
    }
  }
}

TEST_CASE("the typed calls take device tensors, and keep their packing memory") {
  if (ranks_here(2) < 2) return;
  comm::run_threads(
      2,
      [](comm::threads& threads) {
        exec::cuda ex({.device = threads.rank()});
        comm::nccl world(threads, ex, {.stall_limit = 20});
        mesh on(world, {.tensor = 2});
        tensor<float, 2> sums({3, 4});
        for (index_t i = 0; i < 12; ++i) sums.data()[i] = static_cast<float>(i + threads.rank());
        partitioned_tensor<float, 2, exec::cuda_memory, placed<axis::tensor, partial<>>> x(on.place(),
                                                                                           {3, 4});
        partitioned_tensor<float, 2, exec::cuda_memory, placed<axis::tensor, shard<1>>> y(on.place(), {3, 4});
        exec::copy(ex, x.local(), sums.view());
        index_t allocations = 0;
        for (int round = 0; round < 3; ++round) {
          redistribute(ex, on, y, x);
          start_redistribute(ex, on, y, x).wait();
          if (round == 0) allocations = ex.scratch().allocations();
        }
        CHECK(ex.scratch().allocations() == allocations);
        tensor<float, 2> part({3, 2});
        exec::copy(ex, part.view(), y.local());
        for (index_t i = 0; i < 3; ++i)
          for (index_t j = 0; j < 2; ++j)
            CHECK(part(i, j) == static_cast<float>(2 * (i * 4 + j + 2 * threads.rank()) + 1));
      },
      {.stall_limit = 20});
}
