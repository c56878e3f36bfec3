#include <tessera/parallel/context_attention.hpp>

#include <tessera/comm/self.hpp>

#include "context_fixture.hpp"

using namespace context_fixture;

namespace {

// The program of docs/context_parallel.md.
void attend(comm::threads& comm, index_t batch, index_t length) {
  exec::host ex({.threads = 1});
  parallel::context_options const options{.sequence_length = length}; // causal, zig-zag
  auto const shards = options.shards(comm.size());
  auto const mine = shards.positions(comm.rank()); // local row t is position mine.at(t)
  index_t const heads = 4, key_heads = 2, width = 8;

  tensor<float, 4> q({batch, mine.size(), heads, width}), out(q.extents()), dq(q.extents()),
      d_out(q.extents());
  tensor<float, 4> k({batch, mine.size(), key_heads, width}), v(k.extents()), dk(k.extents()),
      dv(k.extents());
  tensor<float, 3> log_sum_exp({batch, heads, mine.size()});

  auto const form = parallel::context_form::ring;
  arena<> memory(parallel::context_attention_backward_scratch_bytes<float>(
      form, {batch, heads, key_heads, width}, shards));
  parallel::context_attention(ex, comm, form, out.view(), log_sum_exp.view(), q, k, v, options, memory);
  parallel::context_attention_backward(ex, comm, form, dq.view(), dk.view(), dv.view(), d_out, q, k, v, out,
                                       log_sum_exp, options, memory);
}

} // namespace

TEST_CASE("the documentation's program runs") {
  comm::run_threads(2, [](comm::threads& comm) { attend(comm, 2, 33); },
                    {.checked = true, .stall_limit = 20});
}

TEST_CASE("both forms give what one rank gives") {
  for (auto form : {context_form::ring, context_form::exchange})
    compare<float>({2, 26, 4, 2, 8}, form, 4, {});
}

TEST_CASE("one rank alone attends to its own sequence, takes no memory and sends nothing") {
  for (auto form : {context_form::ring, context_form::exchange}) {
    sizes const s{2, 19, 4, 2, 5};
    context_options const options{.sequence_length = s.tokens};
    exec::host ex({.threads = 1});
    comm::self comm;
    attention_call<float> x(s), alone(s);
    CHECK(parallel::context_attention_scratch_bytes<float>(form, s.others(), options.shards(1)) == 0);
    CHECK(parallel::context_attention_backward_scratch_bytes<float>(form, s.others(), options.shards(1)) ==
          0);
    run_part(ex, comm, form, x, options);
    run_alone(alone, options);
    CHECK(numbers(x.out.view()) == numbers(alone.out.view()));
    CHECK(numbers(x.dk()) == numbers(alone.dk()));
    CHECK(comm.meter().total().calls == 0);
  }
}

TEST_CASE("memory that is enough for the backward is enough for the forward") {
  for (auto form : {context_form::ring, context_form::exchange})
    for (int ranks : {1, 2, 3, 4, 8})
      for (index_t key_heads : {1, 4, 8, 24}) {
        parallel::context_sizes const sizes{2, 24, key_heads, 5};
        layout::sequence_shards const shards{37, ranks};
        CHECK(parallel::context_attention_scratch_bytes<bf16>(form, sizes, shards) <=
              parallel::context_attention_backward_scratch_bytes<bf16>(form, sizes, shards));
      }
}

TEST_CASE("forms have names") {
  CHECK(std::string(name_of(context_form::ring)) == "ring");
  CHECK(std::string(name_of(context_form::exchange)) == "exchange");
}
