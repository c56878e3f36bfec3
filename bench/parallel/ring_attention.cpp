// requires: mpi
// smoke: f32
// Attention over a sequence that is spread over ranks, per token, beside attention by one rank over as long a
// sequence of its own: each rank of ours has 1/n of that work, so a ratio of 1 is a perfect split. Sizes of
// GPT-2's attention. Run under mpiexec.
#include <tessera/core/philox.hpp>
#include <tessera/parallel/context_attention.hpp>

#include "support/ranks.hpp"

namespace {

using namespace tessera;

/// Inputs and outputs of attention over `tokens` tokens.
template <class T>
struct attention_of {
  static constexpr index_t heads = 12, width = 64;

  attention_of(index_t tokens, std::uint64_t seed)
      : q({1, tokens, heads, width}), k(q.extents()), v(q.extents()), d_out(q.extents()), out(q.extents()),
        dq(q.extents()), dk(q.extents()), dv(q.extents()), log_sum_exp({1, heads, tokens}) {
    philox const random(seed);
    std::uint64_t i = 0;
    for (auto* each : {&q, &k, &v, &d_out})
      for (auto& value : each->span()) value = T(random.normal(i++));
  }

  tensor<T, 4> q, k, v, d_out, out, dq, dk, dv;
  tensor<float, 3> log_sum_exp;
};

template <class T>
void register_form(comm::mpi& ranks, double seconds, parallel::context_form form, std::string const& type) {
  index_t const length = 1024;
  auto const title = [&](char const* name) {
    return "parallel/ring_attention/" + std::string(name_of(form)) + name + "/" + type +
           "/ranks:" + std::to_string(ranks.size()) + "/tokens:" + std::to_string(length);
  };
  auto const measure = [=, &ranks](benchmark::State& state, bool backward) {
    exec::host ex({.threads = 1});
    parallel::context_options const options{.sequence_length = length};
    auto const shards = options.shards(ranks.size());
    attention_of<T> part(shards.local_length(ranks.rank()), 1), whole(length, 2);
    parallel::context_sizes const sizes{1, part.heads, part.heads, part.width};
    arena<> memory(parallel::context_attention_backward_scratch_bytes<T>(form, sizes, shards));
    auto const attend = [&] {
      parallel::context_attention(ex, ranks, form, part.out.view(), part.log_sum_exp.view(), part.q, part.k,
                                  part.v, options, memory);
    };
    auto const attend_alone = [&] {
      ops::attention(ex, whole.out.view(), whole.log_sum_exp.view(), whole.q, whole.k, whole.v);
    };
    auto const share = 1 / static_cast<double>(ranks.size());
    if (!backward)
      return bench::by_turns_on_ranks(state, seconds, "one rank's attention, per token", attend, attend_alone,
                                      share);
    attend();
    attend_alone();
    bench::by_turns_on_ranks(
        state, seconds, "one rank's attention_backward, per token",
        [&] {
          parallel::context_attention_backward(ex, ranks, form, part.dq.view(), part.dk.view(),
                                               part.dv.view(), part.d_out, part.q, part.k, part.v, part.out,
                                               part.log_sum_exp, options, memory);
        },
        [&] {
          ops::attention_backward(ex, whole.dq.view(), whole.dk.view(), whole.dv.view(), whole.d_out, whole.q,
                                  whole.k, whole.v, whole.out, whole.log_sum_exp);
        },
        share);
  };
  bench::register_on_ranks(title(""), [=](benchmark::State& state) { measure(state, false); });
  bench::register_on_ranks(title("_backward"), [=](benchmark::State& state) { measure(state, true); });
}

} // namespace

int main(int argc, char** argv) {
  bench::run_on_ranks(argc, argv, [](comm::mpi& ranks, double seconds) {
    for (auto form : {parallel::context_form::ring, parallel::context_form::exchange}) {
      register_form<float>(ranks, seconds, form, "f32");
      register_form<bf16>(ranks, seconds, form, "bf16");
    }
    return 0;
  });
}
