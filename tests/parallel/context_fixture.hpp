/// What the tests of context parallelism share: attention over a whole sequence, cut over ranks, computed by
/// them, and put together again.
#ifndef TESSERA_TESTS_PARALLEL_CONTEXT_FIXTURE_HPP
#define TESSERA_TESTS_PARALLEL_CONTEXT_FIXTURE_HPP

#include <doctest/doctest.h>

#include <stdexcept>

#include <ops/attention_reference.hpp>
#include <support/finite_difference.hpp>
#include <support/reference.hpp>
#include <tessera/comm/threads.hpp>
#include <tessera/exec/host.hpp>
#include <tessera/parallel/context_attention.hpp>

namespace context_fixture {

using namespace tessera;
using layout::sequence_assignment;
using parallel::context_form;
using parallel::context_options;
using reference::doubles;
using reference::max_relative_error;

struct sizes {
  index_t batch, tokens, heads, key_heads, width;

  parallel::context_sizes others() const { return {batch, heads, key_heads, width}; }
};

/// Inputs and outputs of one attention, whole or a rank's part of one. Queries, keys and values are slices of
/// one packed tensor, as the product that makes them leaves them; so are their gradients.
template <class T>
struct attention_call {
  sizes of;
  tensor<T, 3> packed, d_packed;
  tensor<T, 4> d_out, out;
  tensor<float, 3> log_sum_exp;

  explicit attention_call(sizes s)
      : of(s), packed({s.batch, s.tokens, row()}), d_packed(packed.extents()),
        d_out({s.batch, s.tokens, s.heads, s.width}), out(d_out.extents()),
        log_sum_exp({s.batch, s.heads, s.tokens}) {
    reference::fill_normal(packed.span(), 1);
    reference::fill_normal(d_out.span(), 2);
    reference::fill_normal(d_packed.span(), 3); // must be overwritten
    reference::fill_normal(out.span(), 4);
  }

  index_t row() const { return (of.heads + 2 * of.key_heads) * of.width; }
  view<T, 4> part(tensor<T, 3>& from, index_t first, index_t heads) {
    return {from.data() + first * of.width,
            {of.batch, of.tokens, heads, of.width},
            {of.tokens * row(), row(), of.width, 1}};
  }
  view<T, 4> q() { return part(packed, 0, of.heads); }
  view<T, 4> k() { return part(packed, of.heads, of.key_heads); }
  view<T, 4> v() { return part(packed, of.heads + of.key_heads, of.key_heads); }
  view<T, 4> dq() { return part(d_packed, 0, of.heads); }
  view<T, 4> dk() { return part(d_packed, of.heads, of.key_heads); }
  view<T, 4> dv() { return part(d_packed, of.heads + of.key_heads, of.key_heads); }
};

/// Copies rank-4 views where positions are those of a part: to the part, or from it.
template <class T>
void move_rows(view<T, 4> part, view<T, 4> whole, layout::sequence_positions const& positions, bool to_part) {
  for (index_t b = 0; b < part.extent(0); ++b)
    for (index_t t = 0; t < part.extent(1); ++t)
      for (index_t h = 0; h < part.extent(2); ++h)
        for (index_t d = 0; d < part.extent(3); ++d) {
          auto &a = part(b, t, h, d), &w = whole(b, positions.at(t), h, d);
          to_part ? a = w : w = a;
        }
}
template <class T>
view<T, 4> by_tokens(tensor<T, 3>& sums) {
  return parallel::detail::by_tokens(sums.view());
}

/// One rank's part of a call.
template <class T>
attention_call<T> part_of(attention_call<T>& whole, layout::sequence_positions const& positions) {
  auto s = whole.of;
  s.tokens = positions.size();
  attention_call<T> part(s);
  move_rows(part.q(), whole.q(), positions, true);
  move_rows(part.k(), whole.k(), positions, true);
  move_rows(part.v(), whole.v(), positions, true);
  move_rows(part.d_out.view(), whole.d_out.view(), positions, true);
  return part;
}
/// Puts what a rank computed where it belongs.
template <class T>
void give_back(attention_call<T>& whole, attention_call<T>& part,
               layout::sequence_positions const& positions) {
  move_rows(part.dq(), whole.dq(), positions, false);
  move_rows(part.dk(), whole.dk(), positions, false);
  move_rows(part.dv(), whole.dv(), positions, false);
  move_rows(part.out.view(), whole.out.view(), positions, false);
  move_rows(by_tokens(part.log_sum_exp), by_tokens(whole.log_sum_exp), positions, false);
}

/// Forward and backward of a rank's part, in an arena of exactly the planned size.
template <class Comm, class T>
void run_part(exec::host& ex, Comm& comm, context_form form, attention_call<T>& part,
              context_options const& options) {
  auto const shards = options.shards(comm.size());
  auto const sizes = part.of.others();
  arena<> forward(parallel::context_attention_scratch_bytes<T>(form, sizes, shards));
  arena<> backward(parallel::context_attention_backward_scratch_bytes<T>(form, sizes, shards));
  parallel::context_attention(ex, comm, form, part.out.view(), part.log_sum_exp.view(), part.q(), part.k(),
                              part.v(), options, forward);
  parallel::context_attention_backward(ex, comm, form, part.dq(), part.dk(), part.dv(), part.d_out, part.q(),
                                       part.k(), part.v(), part.out, part.log_sum_exp, options, backward);
  if (forward.used() != 0 || backward.used() != 0) throw std::runtime_error("scratch was not given back");
}

/// The whole call by `ranks` ranks whose lent buffers are watched.
template <class T>
void run_on_ranks(attention_call<T>& whole, context_form form, int ranks, context_options options) {
  options.sequence_length = whole.of.tokens;
  comm::run_threads(ranks,
                    [&](comm::threads& comm) {
                      exec::host ex({.threads = 1});
                      auto const positions = options.shards(ranks).positions(comm.rank());
                      auto part = part_of(whole, positions);
                      run_part(ex, comm, form, part, options);
                      give_back(whole, part, positions);
                    },
                    {.checked = true, .stall_limit = 20});
}

/// What one rank gets.
template <class T>
void run_alone(attention_call<T>& x, context_options const& options) {
  exec::host ex({.threads = 1});
  ops::attention_options const o{.scale = options.scale, .causal = options.causal, .first_query = 0};
  ops::attention(ex, x.out.view(), x.log_sum_exp.view(), x.q(), x.k(), x.v(), o);
  ops::attention_backward(ex, x.dq(), x.dk(), x.dv(), x.d_out, x.q(), x.k(), x.v(), x.out, x.log_sum_exp, o);
}

/// The elements of a strided view, in order.
template <class T>
std::vector<double> numbers(view<T, 4> x) {
  std::vector<double> all;
  for (index_t b = 0; b < x.extent(0); ++b)
    for (index_t t = 0; t < x.extent(1); ++t)
      for (index_t h = 0; h < x.extent(2); ++h)
        for (index_t d = 0; d < x.extent(3); ++d)
          all.push_back(static_cast<double>(static_cast<float>(x(b, t, h, d))));
  return all;
}

/// Over the largest expected value; absolute where all of them are next to nothing, as the gradients of an
/// only key's score are.
inline double error_of(std::vector<double> const& found, std::vector<double> const& expected) {
  double largest = 0, worst = 0;
  for (auto value : expected) largest = std::fmax(largest, std::fabs(value));
  for (std::size_t i = 0; i < expected.size(); ++i) {
    auto const difference = std::fabs(found[i] - expected[i]);
    if (!(difference <= worst)) worst = difference == difference ? difference : INFINITY;
  }
  return found.size() != expected.size() ? INFINITY : largest < 1e-5 ? worst : worst / largest;
}

/// A call on ranks against the same on one rank, and against the definition in float64.
template <class T>
void compare(sizes s, context_form form, int ranks, context_options const& options) {
  CAPTURE(name_of(form));
  CAPTURE(name_of(options.assignment));
  CAPTURE(ranks);
  CAPTURE(s.batch);
  CAPTURE(s.tokens);
  CAPTURE(s.heads);
  CAPTURE(s.key_heads);
  CAPTURE(s.width);
  CAPTURE(options.causal);
  attention_call<T> spread(s), alone(s);
  run_on_ranks(spread, form, ranks, options);
  run_alone(alone, options);
  auto const scale = options.scale == 0 ? 1 / std::sqrt(static_cast<double>(s.width)) : options.scale;
  attention_reference::exact const exact({s.batch, s.tokens, s.tokens, s.heads, s.key_heads, s.width},
                                         numbers(alone.q()), numbers(alone.k()), numbers(alone.v()),
                                         numbers(alone.d_out.view()), scale, options.causal, 0);
  auto const bound = reference::tolerance<T>();
  CHECK(error_of(numbers(spread.out.view()), exact.out) < bound);
  CHECK(max_relative_error(spread.log_sum_exp, exact.log_sum_exp) < 1e-5);
  CHECK(error_of(numbers(spread.dq()), exact.dq) < bound);
  CHECK(error_of(numbers(spread.dk()), exact.dk) < bound);
  CHECK(error_of(numbers(spread.dv()), exact.dv) < bound);
  CHECK(error_of(numbers(spread.out.view()), numbers(alone.out.view())) < bound);
  CHECK(error_of(numbers(spread.dq()), numbers(alone.dq())) < bound);
  CHECK(error_of(numbers(spread.dk()), numbers(alone.dk())) < bound);
  CHECK(error_of(numbers(spread.dv()), numbers(alone.dv())) < bound);
}

/// The gradients against central differences of a scalar of all ranks: the sum of out times d_out.
inline void compare_with_differences(sizes s, context_form form, int ranks, context_options options) {
  CAPTURE(name_of(form));
  CAPTURE(ranks);
  options.sequence_length = s.tokens;
  attention_call<float> whole(s);
  std::vector<double> found, expected;
  comm::run_threads(
      ranks,
      [&](comm::threads& comm) {
        exec::host ex({.threads = 1});
        auto const positions = options.shards(ranks).positions(comm.rank());
        auto part = part_of(whole, positions);
        arena<> memory(
            parallel::context_attention_scratch_bytes<float>(form, s.others(), options.shards(ranks)));
        auto const loss = [&] {
          parallel::context_attention(ex, comm, form, part.out.view(), part.log_sum_exp.view(), part.q(),
                                      part.k(), part.v(), options, memory);
          return comm.all_reduce(reference::dot(numbers(part.out.view()), numbers(part.d_out.view())));
        };
        run_part(ex, comm, form, part, options);
        give_back(whole, part, positions);
        comm.barrier();
        // Every rank goes through all elements of the whole; the one that holds an element moves it.
        for (index_t b = 0; b < s.batch; ++b)
          for (index_t p = 0; p < s.tokens; ++p)
            for (index_t i = 0; i < part.row(); ++i) {
              float nobody = 0;
              auto* at = &nobody;
              for (index_t t = 0; t < positions.size(); ++t)
                if (positions.at(t) == p) at = &part.packed(b, t, i);
              auto const held = *at;
              *at = held + 0.01f;
              auto const above = loss();
              *at = held - 0.01f;
              auto const below = loss();
              *at = held;
              if (comm.rank() != 0) continue;
              found.push_back(static_cast<double>(whole.d_packed(b, p, i)));
              expected.push_back((above - below) / 0.02);
            }
      },
      {.checked = true, .stall_limit = 20});
  REQUIRE(found.size() == static_cast<std::size_t>(whole.packed.size()));
  for (std::size_t i = 0; i < found.size(); ++i) CHECK(std::fabs(found[i] - expected[i]) < 1e-3);
}

/// The bits of one run, for comparing runs.
template <class T>
std::string bits_of_run(sizes s, context_form form, int ranks, context_options const& options) {
  attention_call<T> x(s);
  run_on_ranks(x, form, ranks, options);
  std::string all;
  auto const add = [&](auto const& y) {
    all.append(reinterpret_cast<char const*>(y.data()), y.span().size_bytes());
  };
  add(x.out);
  add(x.log_sum_exp);
  add(x.d_packed);
  return all;
}

/// A rank of threads that breaks down in its `left + 1`st message.
class breaking : public comm::threads {
public:
  breaking(comm::threads&& whole, int left) : comm::threads(std::move(whole)), left_(left) {}

  template <class Span>
  request start_send(Span data, int to, int tag, site where = site::here()) {
    count();
    return comm::threads::start_send(data, to, tag, where);
  }
  template <class Out, class In>
  void all_to_all_v(Out out, std::span<index_t const> out_counts, In in, std::span<index_t const> in_counts,
                    site where = site::here()) {
    count();
    comm::threads::all_to_all_v(out, out_counts, in, in_counts, where);
  }
  breaking split(int color, int key) { return {comm::threads::split(color, key), left_}; }

private:
  void count() {
    if (left_-- == 0) throw std::runtime_error("this rank broke down");
  }
  int left_;
};

/// What each of three ranks ends with when rank 1 breaks down in its message `left` of forward and backward.
inline std::vector<std::string> ends_of_breakdown(context_form form, int left) {
  std::vector<std::string> ends(3);
  sizes const s{1, 12, 3, 3, 4};
  attention_call<float> whole(s);
  context_options const options{.sequence_length = s.tokens};
  try {
    comm::run_threads(3,
                      [&](comm::threads& ranks) {
                        auto& mine = ends[static_cast<std::size_t>(ranks.rank())];
                        exec::host ex({.threads = 1});
                        auto part = part_of(whole, options.shards(3).positions(ranks.rank()));
                        breaking comm(ranks.split(0, 0), ranks.rank() == 1 ? left : 1000);
                        try {
                          run_part(ex, comm, form, part, options);
                        } catch (peer_failed const& caught) {
                          mine = std::string("peer_failed: ") + caught.what();
                          throw;
                        } catch (std::exception const& caught) {
                          mine = caught.what();
                          throw;
                        }
                      },
                      {.stall_limit = 20});
  } catch (std::runtime_error const&) { // the first real error, of rank 1
  }
  return ends;
}

} // namespace context_fixture

#endif
