#include <tessera/parallel/ring_attention.hpp>

#include <support/thrown.hpp>

#include "context_fixture.hpp"

using namespace context_fixture;

namespace {

constexpr sequence_assignment assignments[] = {sequence_assignment::contiguous, sequence_assignment::zigzag};

template <class T>
void compare_ring(sizes s, int ranks, bool causal = true) {
  for (auto assignment : assignments)
    compare<T>(s, context_form::ring, ranks, {.assignment = assignment, .causal = causal});
}

} // namespace

TEST_CASE_TEMPLATE("ring attention and its gradients are those of one rank and of the definition", T, float,
                   bf16) {
  for (int ranks = 1; ranks <= 4; ++ranks) {
    compare_ring<T>({1, 24, 2, 2, 8}, ranks);
    compare_ring<T>({3, 37, 4, 2, 5}, ranks); // odd, several samples, grouped heads
  }
  compare_ring<T>({2, 29, 4, 1, 16}, 3);
}

TEST_CASE("every query may see all keys") {
  for (int ranks = 2; ranks <= 4; ++ranks) compare_ring<float>({2, 23, 2, 1, 6}, ranks, false);
}

TEST_CASE("sequences shorter than the ring, chunks without a token, and nothing at all") {
  for (int ranks = 2; ranks <= 4; ++ranks)
    for (index_t tokens : {1, 2, 3, 5, 7}) compare_ring<float>({2, tokens, 2, 1, 3}, ranks);
  for (auto assignment : assignments)
    for (sizes s : {sizes{1, 0, 2, 1, 4}, sizes{0, 9, 2, 1, 4}, sizes{1, 9, 0, 0, 4}, sizes{1, 9, 2, 1, 0}}) {
      attention_call<float> x(s);
      run_on_ranks(x, context_form::ring, 3, {.assignment = assignment});
    }
}

TEST_CASE("a scale of one's own, and heads of one element") {
  compare<float>({1, 13, 3, 1, 1}, context_form::ring, 3, {.scale = -0.7f});
}

TEST_CASE("scores that differ by much between the ranks' keys do not overflow") {
  sizes const s{1, 24, 1, 1, 4};
  attention_call<float> spread(s), alone(s);
  for (auto* x : {&spread, &alone})
    for (index_t t = 0; t < s.tokens; ++t)
      for (index_t d = 0; d < s.width; ++d) x->k()(0, t, 0, d) *= t < 12 ? 100.0f : 0.01f;
  run_on_ranks(spread, context_form::ring, 4, {});
  run_alone(alone, {});
  CHECK(error_of(numbers(spread.out.view()), numbers(alone.out.view())) < 1e-5);
  CHECK(error_of(numbers(spread.dq()), numbers(alone.dq())) < 1e-4);
}

TEST_CASE("gradients agree with finite differences of a scalar of all ranks") {
  compare_with_differences({1, 7, 2, 1, 3}, context_form::ring, 2, {});
  compare_with_differences({1, 5, 2, 2, 2}, context_form::ring, 3, {.causal = false});
  compare_with_differences({2, 5, 2, 1, 2}, context_form::ring, 4,
                           {.assignment = sequence_assignment::contiguous});
}

TEST_CASE("every run gives the same bits") {
  for (auto assignment : assignments) {
    auto const first = bits_of_run<bf16>({2, 29, 4, 2, 8}, context_form::ring, 4, {.assignment = assignment});
    for (int run = 0; run < 3; ++run)
      CHECK(bits_of_run<bf16>({2, 29, 4, 2, 8}, context_form::ring, 4, {.assignment = assignment}) == first);
  }
}

TEST_CASE("the ring sends what its formula says") {
  sizes const s{2, 37, 4, 2, 5};
  context_options const options{.sequence_length = s.tokens};
  for (int ranks = 1; ranks <= 4; ++ranks)
    comm::run_threads(ranks, [&](comm::threads& comm) {
      exec::host ex({.threads = 1});
      auto const shards = options.shards(ranks);
      auto part =
          attention_call<bf16>({s.batch, shards.local_length(comm.rank()), s.heads, s.key_heads, s.width});
      arena<> memory(parallel::ring_attention_backward_scratch_bytes<bf16>(s.others(), shards));
      // Elements of keys and values of the ranks whose blocks pass through here, and of those that come back.
      index_t sent = 0, sent_back = 0;
      for (int step = 0; step + 1 < ranks; ++step) {
        auto const of = [&](int rank) {
          return 2 * s.batch * shards.local_length((rank + 2 * ranks) % ranks) * s.key_heads * s.width;
        };
        sent += of(comm.rank() - step);
        sent_back += of(comm.rank() - step - 1);
      }
      parallel::ring_attention(ex, comm, part.out.view(), part.log_sum_exp.view(), part.q(), part.k(),
                               part.v(), options, memory);
      auto const forward = comm.meter().of(comm::collective::send);
      if (forward.calls != ranks - 1 || forward.bytes != 2 * sent) throw std::runtime_error("forward");
      parallel::ring_attention_backward(ex, comm, part.dq(), part.dk(), part.dv(), part.d_out, part.q(),
                                        part.k(), part.v(), part.out, part.log_sum_exp, options, memory);
      auto const both = comm.meter().of(comm::collective::send);
      if (both.calls != 3 * (ranks - 1) || both.bytes != 4 * sent + 4 * sent_back)
        throw std::runtime_error("backward");
      if (comm.meter().total().calls != 6 * (ranks - 1)) throw std::runtime_error("something else was sent");
    });
}

TEST_CASE("a rank that breaks down ends the others, which say in what") {
  for (int message = 0; message < 6; ++message) { // of forward and backward
    CAPTURE(message);
    auto const ends = ends_of_breakdown(context_form::ring, message);
    CHECK(ends[1] == "this rank broke down");
    for (int r : {0, 2}) {
      auto const& end = ends[static_cast<std::size_t>(r)];
      if (end.empty()) continue; // a rank that needs nothing more of the others has finished
      CAPTURE(end);
      CHECK(end.find("peer_failed: ") == 0);
      CHECK((end.find("receive") != std::string::npos || end.find("send") != std::string::npos));
    }
    CHECK((!ends[0].empty() || !ends[2].empty()));
  }
}

TEST_CASE("what does not fit is refused before anything is sent") {
  comm::run_threads(2, [](comm::threads& comm) {
    exec::host ex({.threads = 1});
    attention_call<float> x({1, 8, 2, 1, 4});
    arena<> memory(1 << 20), small(64);
    auto const id_of = [&](context_options const& options, view<float, 4> k, view<float, 4> out,
                           arena<>& scratch) {
      try {
        parallel::ring_attention(ex, comm, out, x.log_sum_exp.view(), x.q(), k, x.v(), options, scratch);
      } catch (error const& caught) {
        return std::string(caught.id());
      }
      return std::string();
    };
    auto const expect = [](std::string const& found, char const* id) {
      if (found != id) throw std::runtime_error(found + " instead of " + id);
    };
    expect(id_of({}, x.k(), x.out, memory), "E-parallel-060");
    expect(id_of({.sequence_length = 20}, x.k(), x.out, memory), "E-parallel-061");
    tensor<float, 4> three({1, 8, 3, 4}), short_keys({1, 7, 1, 4}), wide({1, 8, 2, 5});
    expect(id_of({.sequence_length = 16}, three, x.out, memory), "E-parallel-062");
    expect(id_of({.sequence_length = 16}, short_keys, x.out, memory), "E-ops-001");
    expect(id_of({.sequence_length = 16}, x.k(), wide, memory), "E-ops-001");
    expect(id_of({.sequence_length = 16}, x.k(), x.out, small), "E-core-011");
    if (comm.meter().total().calls != 0) throw std::runtime_error("something was sent");
  });
}
