// Redistributions and arithmetic that make no sense do not compile: a reduction that is not there, a maximum
// made of a sum, a dimension that the tensor lacks, summands added to values, a gradient used before its sum.
#include <tessera/comm/self.hpp>
#include <tessera/exec/host.hpp>
#include <tessera/partition/arithmetic.hpp>
#include <tessera/partition/redistribute.hpp>

using namespace tessera;
using namespace tessera::partition;
using comm::reduction;

template <class P>
using over_tensor = partitioned_tensor<float, 2, host_memory, placed<axis::tensor, P>>;

void update_weights(partitioned_view<float const, 2, host_memory, placed<axis::tensor, invariant>>) {}

int main() {
  comm::self alone;
  mesh mesh(alone, {});
  exec::host ex({.threads = 1});
  over_tensor<partial<>> sums(mesh.place(), {4, 6}), more(mesh.place(), {4, 6});
  over_tensor<replicate> values(mesh.place(), {4, 6});
  over_tensor<shard<0>> rows(mesh.place(), {4, 6});
  over_tensor<partial<reduction::max>> largest(mesh.place(), {4, 6});
  auto mine = redistribute<shard<0>>(ex, mesh, sums);
  add(ex, sums, sums, more);
  update_weights(redistribute<invariant>(ex, mesh, sums));
#if MISUSE == 1
  add(ex, values, values, sums); // expect-error: same_partition
#elif MISUSE == 2
  pointwise([](auto, auto, auto) {}, sums, sums, more); // expect-error: summands_added
#elif MISUSE == 3
  add_constant(ex, sums, sums, 1.0f); // expect-error: summands_added
#elif MISUSE == 4
  auto wrong = redistribute<partial<>>(ex, mesh, largest); // expect-error: redistributable_to
#elif MISUSE == 5
  auto wrong = redistribute<partial<reduction::max>>(ex, mesh, values); // expect-error: redistributable_to
#elif MISUSE == 6
  auto wrong = redistribute<shard<2>>(ex, mesh, sums); // expect-error: redistributable_to
#elif MISUSE == 7
  auto wrong = redistribute<shard<0>, shard<1>>(ex, mesh, sums); // expect-error: redistributable_to
#elif MISUSE == 8
  redistribute_backward<partial<reduction::max>>(ex, mesh, values); // expect-error: differentiable
#elif MISUSE == 9
  update_weights(sums); // expect-error: partial
#elif MISUSE == 10
  partitioned_tensor<bf16, 2, host_memory, placed<axis::tensor, shard<0>>> narrow_rows(mesh.place(), {4, 6});
  redistribute(ex, mesh, narrow_rows, sums); // expect-error: redistributable
#elif MISUSE == 11
  over_tensor<shard<2>> nowhere; // expect-error: placements_of_rank
#elif MISUSE == 12
  partitioned_tensor<float, 1, host_memory, placed<axis::tensor, shard<0>>, placed<axis::tensor, replicate>>
      twice; // expect-error: placements_of_rank
#elif MISUSE == 13
  scale(ex, largest, largest, 2.0f); // expect-error: linear_in_summands
#endif
}
