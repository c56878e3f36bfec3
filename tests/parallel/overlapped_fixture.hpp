/// Problems for the tests of overlapped products, on any space and communicator: what every rank holds, the
/// double-precision result, and its gradients by finite differences.
#ifndef TESSERA_TESTS_PARALLEL_OVERLAPPED_FIXTURE_HPP
#define TESSERA_TESTS_PARALLEL_OVERLAPPED_FIXTURE_HPP

#include <doctest/doctest.h>

#include <tessera/parallel/overlapped_linear.hpp>

#include "support/finite_difference.hpp"
#include "support/reference.hpp"

namespace overlapped {

using namespace tessera;
using reference::numbers;

/// One problem: rows of each of four ranks (fewer ranks leave the last blocks out), k, n, chunks.
struct problem {
  std::vector<index_t> rows;
  index_t k, n;
  int chunks;
  bool even = false; ///< Let layout::shard_of cut the rows.

  std::vector<index_t> blocks(int ranks) const {
    std::vector<index_t> out(rows.begin(), rows.begin() + ranks);
    if (even) {
      index_t total = 0;
      for (auto each : out) total += each;
      for (int r = 0; r < ranks; ++r)
        out[static_cast<std::size_t>(r)] = layout::shard_of(total, ranks, r).size();
    }
    return out;
  }
};
inline std::vector<problem> problems() {
  return {{{5, 0, 3, 9}, 7, 6, 4},
          {{1, 1, 1, 1}, 3, 1, 1},
          {{4, 6, 1, 0}, 33, 17, 3, true},
          {{0, 40, 2, 7}, 16, 32, 100},
          {{0, 0, 0, 0}, 4, 5, 2}};
}

inline index_t sum_of(std::vector<index_t> const& counts) {
  index_t sum = 0;
  for (auto each : counts) sum += each;
  return sum;
}
inline index_t begin_of(std::vector<index_t> const& counts, int rank) {
  index_t begin = 0;
  for (int r = 0; r < rank; ++r) begin += counts[static_cast<std::size_t>(r)];
  return begin;
}

/// [m, n] = a[m, k] b[n, k]^T.
inline numbers product(numbers const& a, numbers const& b, index_t m, index_t n, index_t k) {
  numbers c(static_cast<std::size_t>(m * n));
  for (index_t i = 0; i < m; ++i)
    for (index_t j = 0; j < n; ++j)
      for (index_t l = 0; l < k; ++l)
        c[static_cast<std::size_t>(i * n + j)] +=
            a[static_cast<std::size_t>(i * k + l)] * b[static_cast<std::size_t>(j * k + l)];
  return c;
}
inline numbers biased(numbers c, numbers const& bias) {
  for (std::size_t i = 0; i < c.size(); ++i) c[i] += bias[i % bias.size()];
  return c;
}
inline numbers gelu(numbers x) {
  for (auto& v : x) v = 0.5 * v * (1 + std::tanh(0.7978845608028654 * (v + 0.044715 * v * v * v)));
  return x;
}
inline numbers part(numbers const& x, index_t begin, index_t count) {
  return {x.begin() + begin, x.begin() + begin + count};
}

/// What rank r holds of a problem; the same seeds everywhere, so that each rank knows the others' too.
template <class T>
struct held {
  tensor<T, 2> in, weight, d_out;
  tensor<T, 1> bias;
};
template <class T>
held<T> gathering(problem const& p, int rank, index_t rows, index_t all) {
  auto const seed = static_cast<std::uint64_t>(10 * rank);
  return {reference::normal<T, 2>({rows, p.k}, seed + 1), reference::normal<T, 2>({p.n, p.k}, seed + 2, 0.5f),
          reference::normal<T, 2>({all, p.n}, seed + 3), reference::normal<T, 1>({p.n}, seed + 4)};
}
template <class T>
held<T> scattering(problem const& p, int rank, index_t rows, index_t all) {
  auto const seed = static_cast<std::uint64_t>(10 * rank);
  return {reference::normal<T, 2>({all, p.k}, seed + 5), reference::normal<T, 2>({p.n, p.k}, seed + 6, 0.5f),
          reference::normal<T, 2>({rows, p.n}, seed + 7), reference::normal<T, 1>({p.n}, seed + 8)};
}

/// A tensor in the memory of a space, and back.
template <class Ex, class T, int Rank>
tensor<T, Rank, typename Ex::memory> brought(Ex& ex, tensor<T, Rank> const& from) {
  tensor<T, Rank, typename Ex::memory> to(from.extents());
  exec::copy(ex, to.span(), std::span<T const>(from.span()));
  return to;
}
template <class Ex, class T, int Rank, class M>
tensor<T, Rank> fetched(Ex& ex, tensor<T, Rank, M> const& from) {
  tensor<T, Rank> to(from.extents());
  exec::copy(ex, to.span(), memory_span<T const, M>(from.span()));
  return to;
}

/// gather_linear and its backward on one rank, against the reference.
template <class T, class Ex, class Comm>
void check_gather(Ex& ex, Comm& comm, problem const& p, bool activated) {
  using M = typename Ex::memory;
  auto const rank = comm.rank(), ranks = comm.size();
  auto const blocks = p.blocks(ranks);
  auto const all = sum_of(blocks), rows = blocks[static_cast<std::size_t>(rank)];
  std::vector<held<T>> everybody;
  numbers x;
  for (int r = 0; r < ranks; ++r) {
    everybody.push_back(gathering<T>(p, r, blocks[static_cast<std::size_t>(r)], all));
    auto const values = reference::doubles(everybody.back().in.span());
    x.insert(x.end(), values.begin(), values.end());
  }
  auto const& mine = everybody[static_cast<std::size_t>(rank)];
  auto const in = brought(ex, mine.in), weight = brought(ex, mine.weight), d_out = brought(ex, mine.d_out);
  auto const bias = brought(ex, mine.bias);
  parallel::overlap_options const overlap{
      .rows = p.even ? std::span<index_t const>() : std::span<index_t const>(blocks), .chunks = p.chunks};
  tensor<T, 2, M> out({all, p.n}), pre({all, p.n}), gathered({all, p.k}), scratch({all, p.n});
  arena<M> memory((std::max)(parallel::gather_linear_scratch_bytes<T, M>(all, p.k, ranks),
                             parallel::linear_scatter_scratch_bytes<T, M>(all, p.k, ranks, overlap)));
  parallel::gather_linear_options<T, M> options{.overlap = overlap};
  parallel::gather_linear(ex, comm, out.view(), in.view(), weight.view(), bias.view(), options, memory);
  CHECK(memory.used() == 0);
  CHECK(memory.peak() <= parallel::gather_linear_scratch_bytes<T, M>(all, p.k, ranks));

  auto const w = reference::doubles(mine.weight.span()), b = reference::doubles(mine.bias.span());
  auto const tolerance = reference::tolerance<T>();
  CHECK(reference::max_relative_error(fetched(ex, out), biased(product(x, w, all, p.n, p.k), b)) < tolerance);

  options.gathered = gathered.view();
  if (activated) {
    options.linear.activation = ops::activation::gelu_tanh;
    options.linear.pre_activation = pre.view();
  }
  parallel::gather_linear(ex, comm, out.view(), in.view(), weight.view(), bias.view(), options, memory);
  auto const f = [&](numbers const& v) { return activated ? gelu(v) : v; };
  CHECK(reference::max_relative_error(fetched(ex, out), f(biased(product(x, w, all, p.n, p.k), b))) <
        tolerance);
  CHECK(reference::max_relative_error(fetched(ex, gathered), x) < 1e-30);

  tensor<T, 2, M> d_in({rows, p.k});
  tensor<float, 2, M> d_weight({p.n, p.k});
  tensor<float, 1, M> d_bias({p.n});
  ops::linear_backward_options<T, M> backward;
  if (activated) {
    backward.activation = ops::activation::gelu_tanh;
    backward.pre_activation = pre.view();
    backward.scratch = scratch.view();
  }
  parallel::gather_linear_backward(
      ex, comm, ops::linear_gradients<T, float, M>{d_in.view(), d_weight.view(), d_bias.view()}, d_out.view(),
      gathered.view(), weight.view(), backward, overlap, memory);
  CHECK(memory.used() == 0);
  CHECK(memory.peak() == memory.capacity());

  if (all * p.k > 200) return; // differences of each element are for the small ones
  // The global loss: what every rank's output is weighted by, all added up.
  auto const loss = [&](numbers const& in_all) {
    double sum = 0;
    for (auto const& each : everybody)
      sum += reference::dot(f(biased(product(in_all, reference::doubles(each.weight.span()), all, p.n, p.k),
                                     reference::doubles(each.bias.span()))),
                            reference::doubles(each.d_out.span()));
    return sum;
  };
  auto const c = reference::doubles(mine.d_out.span());
  auto const dx = reference::gradient(x, loss);
  auto const loose = sizeof(T) == 4 ? 2e-5 : 3e-2;
  CHECK(reference::max_relative_error(fetched(ex, d_in), part(dx, begin_of(blocks, rank) * p.k, rows * p.k)) <
        loose);
  CHECK(reference::max_relative_error(fetched(ex, d_weight), reference::gradient(w, [&](numbers const& v) {
                                        return reference::dot(f(biased(product(x, v, all, p.n, p.k), b)), c);
                                      })) < loose);
  CHECK(reference::max_relative_error(fetched(ex, d_bias), reference::gradient(b, [&](numbers const& v) {
                                        return reference::dot(f(biased(product(x, w, all, p.n, p.k), v)), c);
                                      })) < loose);
}

/// linear_scatter and its backward on one rank, against the reference; `unoverlapped` is the tensor that the
/// product and then the collective give, whose bits are the same.
template <class T, class Ex, class Comm>
void check_scatter(Ex& ex, Comm& comm, problem const& p, comm::summation order) {
  using M = typename Ex::memory;
  auto const rank = comm.rank(), ranks = comm.size();
  auto const blocks = p.blocks(ranks);
  auto const all = sum_of(blocks), rows = blocks[static_cast<std::size_t>(rank)];
  std::vector<held<T>> everybody;
  numbers sum(static_cast<std::size_t>(all * p.n)), magnitude(sum.size());
  for (int r = 0; r < ranks; ++r) {
    auto const& each = everybody.emplace_back(scattering<T>(p, r, blocks[static_cast<std::size_t>(r)], all));
    auto summand =
        product(reference::doubles(each.in.span()), reference::doubles(each.weight.span()), all, p.n, p.k);
    if (r == 0) summand = biased(summand, reference::doubles(each.bias.span()));
    for (std::size_t i = 0; i < sum.size(); ++i) sum[i] += summand[i], magnitude[i] += std::abs(summand[i]);
  }
  auto const& mine = everybody[static_cast<std::size_t>(rank)];
  auto const in = brought(ex, mine.in), weight = brought(ex, mine.weight), d_out = brought(ex, mine.d_out);
  auto const bias = brought(ex, mine.bias);
  auto const my_bias = rank == 0 ? view<T const, 1, M>(bias.view()) : view<T const, 1, M>();
  parallel::overlap_options const overlap{.rows = p.even ? std::span<index_t const>()
                                                         : std::span<index_t const>(blocks),
                                          .chunks = p.chunks,
                                          .order = order};
  tensor<T, 2, M> out({rows, p.n}), whole({all, p.n}), expected({rows, p.n});
  arena<M> memory((std::max)(parallel::linear_scatter_scratch_bytes<T, M>(all, p.n, ranks, overlap),
                             parallel::linear_scatter_backward_scratch_bytes<T, M>(all, p.n, ranks)));
  parallel::linear_scatter(ex, comm, out.view(), in.view(), weight.view(), my_bias, overlap, memory);
  CHECK(memory.used() == 0);
  CHECK(memory.peak() == parallel::linear_scatter_scratch_bytes<T, M>(all, p.n, ranks, overlap));
  // Each summand is rounded once, and the sum of what was rounded.
  auto const actual = fetched(ex, out);
  auto const mine_of_sum = part(sum, begin_of(blocks, rank) * p.n, rows * p.n);
  double largest = 0;
  for (auto each : magnitude) largest = (std::max)(largest, each);
  bool close = true;
  for (std::size_t i = 0; i < mine_of_sum.size(); ++i)
    close = close && std::abs(static_cast<double>(static_cast<float>(actual.span()[i])) - mine_of_sum[i]) <=
                         largest * (sizeof(T) == 4 ? 1e-6 : 0x1p-7);
  CHECK(close);

  // In the pieces in which it was multiplied; where they are three rows or more, also all at once.
  parallel::detail::row_blocks const pieces{all, ranks, blocks};
  auto const chunks = ranks == 1 ? 1 : pieces.useful_chunks(p.chunks);
  index_t shortest = 3;
  for (int r = 0; r < ranks; ++r)
    for (int c = 0; c < chunks; ++c) {
      auto const rows_of = pieces.chunk(r, c, chunks);
      if (!rows_of.empty()) shortest = (std::min)(shortest, rows_of.size());
      ops::linear(ex, whole.view().slice(0, rows_of.begin, rows_of.end),
                  in.view().slice(0, rows_of.begin, rows_of.end), weight.view(), my_bias);
    }
  if (shortest >= 3) ops::linear(ex, whole.view(), in.view(), weight.view(), my_bias);
  std::vector<index_t> counts;
  for (auto each : blocks) counts.push_back(each * p.n);
  comm.reduce_scatter_v(expected.span(), memory_span<T const, M>(whole.span()), counts, {.order = order});
  auto const wanted = fetched(ex, expected);
  CHECK(std::equal(actual.span().begin(), actual.span().end(), wanted.span().begin()));

  tensor<T, 2, M> d_in({all, p.k});
  tensor<float, 2, M> d_weight({p.n, p.k});
  tensor<float, 1, M> d_bias({p.n});
  parallel::linear_scatter_backward(
      ex, comm,
      ops::linear_gradients<T, float, M>{d_in.view(), d_weight.view(),
                                         rank == 0 ? d_bias.view() : view<float, 1, M>()},
      d_out.view(), in.view(), weight.view(), {}, overlap, memory);
  CHECK(memory.used() == 0);

  if (all * p.k > 200) return;
  numbers c;
  for (auto const& each : everybody) {
    auto const values = reference::doubles(each.d_out.span());
    c.insert(c.end(), values.begin(), values.end());
  }
  // The global loss depends on this rank's input and weight through its summand alone.
  auto const x = reference::doubles(mine.in.span()), w = reference::doubles(mine.weight.span());
  auto const loose = sizeof(T) == 4 ? 2e-5 : 3e-2;
  CHECK(reference::max_relative_error(fetched(ex, d_in), reference::gradient(x, [&](numbers const& v) {
                                        return reference::dot(product(v, w, all, p.n, p.k), c);
                                      })) < loose);
  CHECK(reference::max_relative_error(fetched(ex, d_weight), reference::gradient(w, [&](numbers const& v) {
                                        return reference::dot(product(x, v, all, p.n, p.k), c);
                                      })) < loose);
  if (rank == 0)
    CHECK(reference::max_relative_error(
              fetched(ex, d_bias),
              reference::gradient(reference::doubles(mine.bias.span()), [&](numbers const& v) {
                return reference::dot(biased(numbers(c.size()), v), c);
              })) < loose);
}

} // namespace overlapped

#endif
