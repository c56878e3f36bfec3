#include <tessera/parallel/sequence_exchange.hpp>

#include <support/thrown.hpp>

#include "context_fixture.hpp"

using namespace context_fixture;

namespace {

constexpr sequence_assignment assignments[] = {sequence_assignment::contiguous, sequence_assignment::zigzag};

template <class T>
void compare_exchange(sizes s, int ranks, bool causal = true) {
  for (auto assignment : assignments)
    compare<T>(s, context_form::exchange, ranks, {.assignment = assignment, .causal = causal});
}

} // namespace

TEST_CASE_TEMPLATE("exchanged attention and its gradients are those of one rank and of the definition", T,
                   float, bf16) {
  for (int ranks : {1, 2, 4}) {
    compare_exchange<T>({1, 24, 4, 4, 8}, ranks);
    compare_exchange<T>({3, 37, 4, 2, 5}, ranks);
  }
  compare_exchange<T>({2, 19, 6, 3, 7}, 3);
}

TEST_CASE("key heads that ranks share are there on each of them, and their gradients are added up") {
  compare_exchange<float>({2, 21, 4, 1, 6}, 2);
  compare_exchange<float>({2, 21, 4, 1, 6}, 4);
  compare_exchange<float>({1, 21, 8, 2, 3}, 4);
  compare_exchange<float>({2, 17, 6, 2, 4}, 3); // a rank's heads lie in two groups
  compare_exchange<float>({2, 17, 6, 3, 4}, 2); // in groups cut unevenly
}

TEST_CASE("every query may see all keys, with a scale of one's own") {
  for (int ranks : {2, 3}) compare_exchange<float>({2, 23, 6, 3, 5}, ranks, false);
  compare<float>({1, 13, 4, 2, 1}, context_form::exchange, 4, {.scale = -0.7f});
}

TEST_CASE("sequences shorter than the number of ranks, and nothing at all") {
  for (index_t tokens : {1, 2, 3, 5, 7})
    for (int ranks : {2, 4}) compare_exchange<float>({2, tokens, 4, 2, 3}, ranks);
  for (auto assignment : assignments)
    for (sizes s : {sizes{1, 0, 4, 1, 4}, sizes{0, 9, 4, 1, 4}, sizes{1, 9, 0, 0, 4}, sizes{1, 9, 4, 1, 0}}) {
      attention_call<float> x(s);
      run_on_ranks(x, context_form::exchange, 4, {.assignment = assignment});
    }
}

TEST_CASE("gradients agree with finite differences of a scalar of all ranks") {
  compare_with_differences({1, 7, 2, 2, 3}, context_form::exchange, 2, {});
  compare_with_differences({2, 5, 4, 1, 2}, context_form::exchange, 4, {}); // all ranks share the key head
  compare_with_differences({1, 5, 3, 1, 2}, context_form::exchange, 3,
                           {.assignment = sequence_assignment::contiguous, .causal = false});
}

TEST_CASE("every run gives the same bits") {
  auto const first = bits_of_run<bf16>({2, 29, 4, 1, 8}, context_form::exchange, 4, {});
  for (int run = 0; run < 3; ++run)
    CHECK(bits_of_run<bf16>({2, 29, 4, 1, 8}, context_form::exchange, 4, {}) == first);
}

TEST_CASE("the exchange sends what its formula says") {
  sizes const s{2, 24, 4, 2, 8}; // pieces are multiples of 16 bytes
  context_options const options{.sequence_length = s.tokens};
  for (int ranks : {1, 2, 4})
    comm::run_threads(ranks, [&](comm::threads& comm) {
      exec::host ex({.threads = 1});
      auto const shards = options.shards(ranks);
      auto const tokens = shards.local_length(comm.rank());
      attention_call<bf16> part({s.batch, tokens, s.heads, s.key_heads, s.width});
      arena<> memory(parallel::exchange_attention_backward_scratch_bytes<bf16>(s.others(), shards));
      auto const heads = s.heads / ranks, key_heads = ranks == 4 ? 1 : s.key_heads / ranks;
      auto const queries = 2 * s.batch * tokens * heads * s.width; // bytes to one rank, or from it
      auto const keys = 2 * s.batch * tokens * key_heads * s.width, sums = 4 * s.batch * tokens * heads;
      auto const sent = [&] { return comm.meter().of(comm::collective::all_to_all); };
      auto const expect = [&](index_t calls, index_t bytes) {
        if (ranks > 1 && (sent().calls != calls || sent().bytes != bytes * ranks))
          throw std::runtime_error(text_of(sent().bytes, " bytes instead of ", bytes * ranks));
      };
      parallel::exchange_attention(ex, comm, part.out.view(), part.log_sum_exp.view(), part.q(), part.k(),
                                   part.v(), options, memory);
      expect(2, queries + 2 * keys + queries + sums);
      comm.meter().reset();
      parallel::exchange_attention_backward(ex, comm, part.dq(), part.dk(), part.dv(), part.d_out, part.q(),
                                            part.k(), part.v(), part.out, part.log_sum_exp, options, memory);
      expect(2, 3 * queries + 2 * keys + sums + queries + 2 * keys);
      if (comm.meter().total().calls != (ranks == 1 ? 0 : 2)) throw std::runtime_error("more was sent");
    });
}

TEST_CASE("a rank that breaks down ends the others, which say in what") {
  for (int message = 0; message < 4; ++message) { // of forward and backward
    CAPTURE(message);
    auto const ends = ends_of_breakdown(context_form::exchange, message);
    CHECK(ends[1] == "this rank broke down");
    for (int r : {0, 2}) {
      auto const& end = ends[static_cast<std::size_t>(r)];
      CAPTURE(end);
      CHECK(end.find("peer_failed: ") == 0);
      CHECK(end.find("all_to_all") != std::string::npos);
    }
  }
}

TEST_CASE("heads that do not divide among the ranks are refused with a way out") {
  comm::run_threads(2, [](comm::threads& comm) {
    exec::host ex({.threads = 1});
    attention_call<float> x({1, 8, 3, 1, 4});
    arena<> memory(1 << 20);
    auto const caught = test::error_of<config_error>([&] {
      parallel::exchange_attention(ex, comm, x.out.view(), x.log_sum_exp.view(), x.q(), x.k(), x.v(),
                                   {.sequence_length = 16}, memory);
    });
    if (caught.id != "E-parallel-063" || !caught.says("3 heads do not divide among 2 context ranks") ||
        !caught.says("the ring"))
      throw std::runtime_error(caught.message);
    auto const unsaid = test::error_of<config_error>([&] {
      parallel::exchange_attention(ex, comm, x.out.view(), x.log_sum_exp.view(), x.q(), x.k(), x.v(), {},
                                   memory);
    });
    if (unsaid.id != "E-parallel-060") throw std::runtime_error(unsaid.message);
  });
}
