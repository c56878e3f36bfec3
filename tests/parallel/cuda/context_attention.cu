// requires: nccl
#include <tessera/comm/cuda/nccl.cuh>
#include <tessera/comm/threads.hpp>
#include <tessera/exec/copy_cuda.hpp>
#include <tessera/ops/cuda/attention.cuh>
#include <tessera/ops/cuda/copy_rows.cuh>
#include <tessera/ops/cuda/merge_attention.cuh>
#include <tessera/ops/cuda/scale.cuh>
#include <tessera/parallel/context_attention.hpp>

#include "parallel/context_fixture.hpp"
#include "support/devices.hpp"

using namespace context_fixture;

namespace {

using device = exec::cuda_memory;

using test::ranks_here;

/// A tensor of the host's on a device.
template <class T, int Rank>
class mirrored {
public:
  mirrored(exec::cuda& ex, tensor<T, Rank>& host) : host_(host), memory_(host.extents()) {
    exec::copy(ex, memory_.span(), std::span<T const>(host.span()));
  }
  view<T, Rank, device> whole() { return memory_; }
  /// The same slice of it.
  view<T, 4, device> at(view<T, 4> slice) {
    return {memory_.data() + (slice.data() - host_.data()), slice.extents(), slice.strides()};
  }
  void fetch(exec::cuda& ex) { exec::copy(ex, host_.span(), memory_span<T const, device>(memory_.span())); }

private:
  tensor<T, Rank>& host_;
  tensor<T, Rank, device> memory_;
};

/// As run_part, on a device.
template <class T>
void run_on_device(exec::cuda& ex, comm::nccl& comm, context_form form, attention_call<T>& x,
                   context_options const& options) {
  auto const shards = options.shards(comm.size());
  auto const sizes = x.of.others();
  arena<device> forward(parallel::context_attention_scratch_bytes<T>(form, sizes, shards));
  arena<device> backward(parallel::context_attention_backward_scratch_bytes<T>(form, sizes, shards));
  mirrored<T, 3> packed(ex, x.packed), d_packed(ex, x.d_packed);
  mirrored<T, 4> d_out(ex, x.d_out), out(ex, x.out);
  mirrored<float, 3> sums(ex, x.log_sum_exp);
  auto const q = packed.at(x.q()), k = packed.at(x.k()), v = packed.at(x.v());
  parallel::context_attention(ex, comm, form, out.whole(), sums.whole(), q, k, v, options, forward);
  parallel::context_attention_backward(ex, comm, form, d_packed.at(x.dq()), d_packed.at(x.dk()),
                                       d_packed.at(x.dv()), d_out.whole(), q, k, v, out.whole(), sums.whole(),
                                       options, backward);
  d_packed.fetch(ex);
  out.fetch(ex);
  sums.fetch(ex);
  ex.synchronize();
}

template <class T>
void compare(sizes s, context_form form, int ranks, context_options options, bool checked) {
  if (ranks_here(ranks) < ranks) return;
  CAPTURE(name_of(form));
  CAPTURE(ranks);
  CAPTURE(checked);
  options.sequence_length = s.tokens;
  attention_call<T> spread(s), alone(s);
  comm::run_threads(ranks,
                    [&](comm::threads& threads) {
                      exec::cuda ex({.device = threads.rank()});
                      comm::nccl comm(threads, ex, {.checked = checked, .stall_limit = checked ? 20.0 : 0.0});
                      auto const positions = options.shards(ranks).positions(comm.rank());
                      auto part = part_of(spread, positions);
                      run_on_device(ex, comm, form, part, options);
                      give_back(spread, part, positions);
                    },
                    {.stall_limit = 20});
  run_alone(alone, options);
  auto const bound = reference::tolerance<T>();
  CHECK(error_of(numbers(spread.out.view()), numbers(alone.out.view())) < bound);
  CHECK(error_of(numbers(spread.dq()), numbers(alone.dq())) < bound);
  CHECK(error_of(numbers(spread.dk()), numbers(alone.dk())) < bound);
  CHECK(error_of(numbers(spread.dv()), numbers(alone.dv())) < bound);
}

} // namespace

TEST_CASE_TEMPLATE("both forms over NCCL give what one rank gives on the host", T, float, bf16) {
  for (auto form : {context_form::ring, context_form::exchange})
    for (auto checked : {false, true}) {
      compare<T>({2, 13, 4, 2, 8}, form, 2, {}, checked);
      compare<T>({1, 10, 4, 1, 5}, form, 4, {}, checked);
    }
}

TEST_CASE("the ring over NCCL with contiguous parts, ranks without tokens, and all keys seen") {
  compare<float>({1, 3, 2, 1, 4}, context_form::ring, 4, {.assignment = sequence_assignment::contiguous},
                 false);
  compare<float>({1, 9, 2, 1, 4}, context_form::ring, 3, {.causal = false}, false);
}
