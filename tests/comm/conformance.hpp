/// What every communicator does, against plain loops. The including file says how to run a body on ranks:
///
///     struct model { template <class Body> static void run(Body body, comm::communicator_options = {}); };
#ifndef TESSERA_TESTS_COMM_CONFORMANCE_HPP
#define TESSERA_TESTS_COMM_CONFORMANCE_HPP

#include <algorithm>
#include <cmath>
#include <cstring>
#include <string>
#include <vector>

#include <doctest/doctest.h>

#include <tessera/comm/communicator.hpp>

namespace conformance {

using namespace tessera;
using comm::reduction;
using comm::summation;

/// Sizes around the border between one message and two (2 KiB), primes, less than one item a rank.
inline std::vector<index_t> const sizes = {0, 1, 2, 3, 7, 61, 255, 257, 513, 1031, 5003};

inline std::size_t at(index_t i) {
  return static_cast<std::size_t>(i);
}

/// Element i of rank r: of very different sizes, so that another order of summation gives other bits.
template <class T>
T value(int r, index_t i) {
  auto const mixed =
      (static_cast<std::uint64_t>(i) * 2654435761u + static_cast<std::uint64_t>(r) * 40503u) % 1021;
  if constexpr (std::same_as<T, std::byte>)
    return static_cast<std::byte>(mixed);
  else if constexpr (std::integral<T>)
    return static_cast<T>(mixed % 13);
  else
    return T(std::ldexp(static_cast<float>(mixed) / 1021.0f - 0.4f, static_cast<int>(mixed % 9)));
}
template <class T>
std::vector<T> values(int r, index_t n) {
  std::vector<T> v(at(n));
  for (index_t i = 0; i < n; ++i) v[at(i)] = value<T>(r, i);
  return v;
}
template <class T>
bool same_bits(std::span<T const> a, std::span<T const> b) {
  return a.size() == b.size() && (a.empty() || std::memcmp(a.data(), b.data(), a.size_bytes()) == 0);
}
template <class T>
bool same_bits(std::vector<T> const& a, std::vector<T> const& b) {
  return same_bits(std::span<T const>(a), std::span<T const>(b));
}

/// The contract of rank_order as a loop: rank 0 first, in float (or wider), rounded once.
template <class T>
T reduced_at(int ranks, index_t i, reduction operation) {
  using wide = std::conditional_t<storage_scalar<T>, float, T>;
  auto sum = static_cast<wide>(value<T>(0, i));
  for (int r = 1; r < ranks; ++r) {
    auto const next = static_cast<wide>(value<T>(r, i));
    sum = operation == reduction::sum   ? static_cast<wide>(sum + next)
          : operation == reduction::max ? (next > sum ? next : sum)
                                        : (next < sum ? next : sum);
  }
  return static_cast<T>(sum);
}
/// The contract of binary_tree as its definition: the tree over `n` ranks from rank r on.
template <class T>
std::conditional_t<storage_scalar<T>, float, T> tree_at(int r, int n, index_t i) {
  using wide = std::conditional_t<storage_scalar<T>, float, T>;
  if (n == 1) return static_cast<wide>(value<T>(r, i));
  int h = 1;
  while (2 * h < n) h *= 2;
  return static_cast<wide>(tree_at<T>(r, h, i) + tree_at<T>(r + h, n - h, i));
}
template <class T>
std::vector<T> reduced_as_tree(int ranks, index_t n) {
  std::vector<T> v(at(n));
  for (index_t i = 0; i < n; ++i) v[at(i)] = static_cast<T>(tree_at<T>(0, ranks, i));
  return v;
}
template <class T>
std::vector<T> reduced(int ranks, index_t n, reduction operation) {
  std::vector<T> v(at(n));
  for (index_t i = 0; i < n; ++i) v[at(i)] = reduced_at<T>(ranks, i, operation);
  return v;
}

/// n items over the ranks, unevenly: ranks 1, 4, 7 ... get none, the last one all that is left.
inline std::vector<index_t> uneven(int ranks, index_t n) {
  std::vector<index_t> counts(at(ranks), 0);
  index_t left = n;
  for (int r = 0; r + 1 < ranks; ++r) {
    auto const take = r % 3 == 1 ? 0 : left / 3 + (left > 0 ? 1 : 0);
    counts[at(r)] = take < left ? take : left;
    left -= counts[at(r)];
  }
  counts.back() += left;
  return counts;
}
inline index_t begin_of(std::vector<index_t> const& counts, int rank) {
  index_t begin = 0;
  for (int r = 0; r < rank; ++r) begin += counts[at(r)];
  return begin;
}

template <class... T, class F>
void for_types(F f) {
  (f(T{}), ...);
}
template <class F>
void for_moved_types(F f) {
  for_types<float, bf16, std::byte, std::int64_t>(f);
}
template <class F>
void for_reduced_types(F f) {
  for_types<float, double, bf16, fp16, std::uint8_t, std::int32_t, std::int64_t>(f);
}

/// The id that `f` throws, or "" if it throws nothing.
template <class F>
std::string id_of(F f) {
  try {
    f();
  } catch (error const& e) {
    return e.id();
  }
  return "";
}

TEST_CASE("a broadcast from any root gives every rank the root's data") {
  model::run([](auto& c) {
    for_moved_types([&]<class T>(T) {
      for (auto n : sizes)
        for (int root = 0; root < c.size(); ++root) {
          auto data = values<T>(c.rank(), n);
          c.broadcast(std::span(data), root);
          CHECK(same_bits(data, values<T>(root, n)));
          data = values<T>(c.rank(), n);
          c.start_broadcast(std::span(data), root).wait();
          CHECK(same_bits(data, values<T>(root, n)));
        }
    });
  });
}

TEST_CASE("all_reduce in rank order has the bits of the loop over ranks, in place or not, at once or later") {
  model::run([](auto& c) {
    for_reduced_types([&]<class T>(T) {
      for (auto n : sizes)
        for (auto operation : {reduction::sum, reduction::max, reduction::min}) {
          auto const expected = reduced<T>(c.size(), n, operation);
          auto const mine = values<T>(c.rank(), n);
          auto in_place = mine;
          std::vector<T> out(at(n)), later(at(n));
          c.all_reduce(std::span(in_place), {.operation = operation});
          c.all_reduce(std::span(out), mine, {.operation = operation});
          c.start_all_reduce(std::span(later), mine, {.operation = operation}).wait();
          CHECK(same_bits(in_place, expected));
          CHECK(same_bits(out, expected));
          CHECK(same_bits(later, expected));
        }
      CHECK(c.all_reduce(value<T>(c.rank(), 5)) == reduced_at<T>(c.size(), 5, reduction::sum));
    });
  });
}

TEST_CASE("sums as a binary tree have the bits of its definition; maxima and minima know no order") {
  model::run([](auto& c) {
    for_reduced_types([&]<class T>(T) {
      comm::reduce_options how{.order = summation::binary_tree};
      for (auto n : sizes) {
        auto const expected = reduced_as_tree<T>(c.size(), n);
        auto const mine = values<T>(c.rank(), n);
        auto in_place = mine;
        std::vector<T> later(at(n)), most(at(n));
        c.all_reduce(std::span(in_place), how);
        c.start_all_reduce(std::span(later), mine, how).wait();
        CHECK(same_bits(in_place, expected));
        CHECK(same_bits(later, expected));
        auto const counts = uneven(c.size(), n);
        auto const begin = begin_of(counts, c.rank()), length = counts[at(c.rank())];
        std::vector<T> part(at(length));
        c.reduce_scatter_v(std::span(part), mine, counts, how);
        CHECK(
            same_bits(std::span<T const>(part), std::span<T const>(expected).subspan(at(begin), at(length))));
        c.all_reduce(std::span(most), mine, {.operation = reduction::max, .order = summation::binary_tree});
        CHECK(same_bits(most, reduced<T>(c.size(), n, reduction::max)));
      }
    });
  });
}

TEST_CASE("as a binary tree, ranks that added aligned pairs beforehand get the bits of twice as many ranks") {
  model::run([](auto& c) {
    for (auto n : {index_t{1}, index_t{257}, index_t{5003}}) {
      std::vector<float> pairs(at(n));
      for (index_t i = 0; i < n; ++i)
        pairs[at(i)] = value<float>(2 * c.rank(), i) + value<float>(2 * c.rank() + 1, i);
      c.all_reduce(std::span(pairs), {.order = summation::binary_tree});
      CHECK(same_bits(pairs, reduced_as_tree<float>(2 * c.size(), n)));
    }
  });
}

TEST_CASE("a native reduction is the same value, to the rounding of its own order") {
  model::run([](auto& c) {
    for_reduced_types([&]<class T>(T) {
      auto const close = [](std::vector<T> const& a, std::vector<T> const& b, index_t begin, index_t end) {
        auto const tolerance = storage_scalar<T> && sizeof(T) == 2 ? 5.0 : 1e-2;
        bool all = true;
        for (index_t i = begin; i < end; ++i)
          all = all && std::abs(static_cast<double>(a[at(i)]) - static_cast<double>(b[at(i)])) <= tolerance;
        return all;
      };
      comm::reduce_options how{.order = summation::native};
      for (auto n : sizes) {
        auto const mine = values<T>(c.rank(), n);
        for (auto operation : {reduction::sum, reduction::max, reduction::min}) {
          how.operation = operation;
          auto const expected = reduced<T>(c.size(), n, operation);
          std::vector<T> out(at(n));
          auto in_place = mine;
          c.all_reduce(std::span(out), mine, how);
          c.start_all_reduce(std::span(in_place), how).wait();
          CHECK(close(out, expected, 0, n));
          CHECK(close(in_place, expected, 0, n));
          auto const counts = uneven(c.size(), n);
          auto part = mine; // the part of the sum lands inside the input
          auto const begin = begin_of(counts, c.rank()), length = counts[at(c.rank())];
          c.reduce_scatter_v(std::span(part).subspan(at(begin), at(length)), part, counts, how);
          CHECK(close(part, expected, begin, begin + length));
          c.reduce(std::span(out), mine, c.size() - 1, how);
          if (c.rank() == c.size() - 1) CHECK(close(out, expected, 0, n));
        }
      }
    });
  });
}

TEST_CASE("reduce leaves the reduction on the root and everybody else's output alone") {
  model::run([](auto& c) {
    for_reduced_types([&]<class T>(T) {
      for (auto n : sizes)
        for (int root = 0; root < c.size(); ++root) {
          auto const mine = values<T>(c.rank(), n);
          std::vector<T> out(at(n), value<T>(9, 9));
          c.reduce(std::span(out), mine, root);
          CHECK(same_bits(out, c.rank() == root ? reduced<T>(c.size(), n, reduction::sum)
                                                : std::vector<T>(at(n), value<T>(9, 9))));
          auto in_place = mine;
          c.reduce(std::span(in_place), in_place, root, {.operation = reduction::max});
          CHECK(same_bits(in_place, c.rank() == root ? reduced<T>(c.size(), n, reduction::max) : mine));
        }
    });
  });
}

TEST_CASE(
    "reduce_scatter leaves each rank its part, also where parts are uneven, empty, or inside the input") {
  model::run([](auto& c) {
    for_reduced_types([&]<class T>(T) {
      for (auto n : sizes) {
        auto const total = n * c.size();
        auto const all = values<T>(c.rank(), total);
        auto const sums = reduced<T>(c.size(), total, reduction::sum);
        auto const part = [&](std::vector<T> const& v, index_t begin, index_t length) {
          return std::span<T const>(v).subspan(at(begin), at(length));
        };
        std::vector<T> out(at(n)), later(at(n));
        c.reduce_scatter(std::span(out), all);
        c.start_reduce_scatter(std::span(later), all).wait();
        CHECK(same_bits(std::span<T const>(out), part(sums, n * c.rank(), n)));
        CHECK(same_bits(std::span<T const>(later), part(sums, n * c.rank(), n)));

        auto const counts = uneven(c.size(), n);
        auto const begin = begin_of(counts, c.rank()), length = counts[at(c.rank())];
        auto whole = values<T>(c.rank(), n);
        c.reduce_scatter_v(std::span(whole).subspan(at(begin), at(length)), whole, counts);
        CHECK(same_bits(part(whole, begin, length), part(sums, begin, length)));
        whole = values<T>(c.rank(), n);
        c.start_reduce_scatter_v(std::span(whole).subspan(at(begin), at(length)), whole, counts).wait();
        CHECK(same_bits(part(whole, begin, length), part(sums, begin, length)));
      }
    });
  });
}

TEST_CASE("all_gather and gather put the ranks' parts in order, scatter takes them apart again") {
  model::run([](auto& c) {
    for_moved_types([&]<class T>(T) {
      for (auto n : sizes) {
        auto const counts = uneven(c.size(), n);
        std::vector<T> even, odd;
        for (int r = 0; r < c.size(); ++r) {
          for (index_t i = 0; i < n; ++i) even.push_back(value<T>(r, i));
          for (index_t i = 0; i < counts[at(r)]; ++i) odd.push_back(value<T>(r, i));
        }
        auto const mine = values<T>(c.rank(), n);
        auto const my_begin = begin_of(counts, c.rank());
        auto const my_odd = values<T>(c.rank(), counts[at(c.rank())]);

        std::vector<T> out(even.size());
        c.all_gather(std::span(out), mine);
        CHECK(same_bits(out, even));
        out.assign(even.size(), T{});
        std::copy(mine.begin(), mine.end(), out.begin() + n * c.rank());
        c.start_all_gather(std::span(out), std::span(out).subspan(at(n * c.rank()), at(n))).wait();
        CHECK(same_bits(out, even));

        out.assign(odd.size(), T{});
        c.start_all_gather_v(std::span(out), my_odd, counts).wait();
        CHECK(same_bits(out, odd));
        out.assign(odd.size(), T{});
        std::copy(my_odd.begin(), my_odd.end(), out.begin() + my_begin);
        // in place on some ranks, from elsewhere on others
        if (c.rank() % 2 == 0)
          c.all_gather_v(std::span(out), std::span(out).subspan(at(my_begin), my_odd.size()), counts);
        else
          c.all_gather_v(std::span(out), my_odd, counts);
        CHECK(same_bits(out, odd));

        for (int root = 0; root < c.size(); ++root) {
          bool const is_root = c.rank() == root;
          std::vector<T> whole(is_root ? even.size() : 0), parts(is_root ? odd.size() : 0);
          c.gather(std::span(whole), mine, root);
          c.gather_v(std::span(parts), my_odd, counts, root);
          if (is_root) CHECK(same_bits(whole, even));
          if (is_root) CHECK(same_bits(parts, odd));
          if (is_root) { // in place
            for (std::size_t i = 0; i < parts.size(); ++i)
              if (i < at(my_begin) || i >= at(my_begin) + my_odd.size()) parts[i] = T{};
            c.gather_v(std::span(parts), std::span(parts).subspan(at(my_begin), my_odd.size()), counts, root);
            CHECK(same_bits(parts, odd));
          } else {
            c.gather_v(std::span(parts), my_odd, counts, root);
          }
          std::vector<T> one(at(n)), some(my_odd.size());
          c.scatter(std::span(one), whole, root);
          c.scatter_v(std::span(some), parts, counts, root);
          CHECK(same_bits(one, mine));
          CHECK(same_bits(some, my_odd));
          if (is_root) {
            c.scatter_v(std::span(parts).subspan(at(my_begin), my_odd.size()), parts, counts, root);
            CHECK(same_bits(parts, odd));
          } else {
            some.assign(some.size(), T{});
            c.scatter_v(std::span(some), parts, counts, root);
            CHECK(same_bits(some, my_odd));
          }
        }
      }
    });
  });
}

TEST_CASE("all_to_all gives rank r part r of everybody, with counts of each pair's own as well") {
  model::run([](auto& c) {
    for_moved_types([&]<class T>(T) {
      for (auto n : sizes) {
        auto const mine = values<T>(c.rank(), n * c.size());
        std::vector<T> out(mine.size()), later(mine.size()), expected;
        for (int from = 0; from < c.size(); ++from)
          for (index_t i = 0; i < n; ++i) expected.push_back(value<T>(from, n * c.rank() + i));
        c.all_to_all(std::span(out), mine);
        c.start_all_to_all(std::span(later), mine).wait();
        CHECK(same_bits(out, expected));
        CHECK(same_bits(later, expected));

        auto const pair = [&](int from, int to) {
          return (from + 2 * to) % 3 == 0 ? index_t{0} : n / (to + 1);
        };
        std::vector<index_t> gives, gets;
        index_t given = 0, got = 0;
        for (int r = 0; r < c.size(); ++r) {
          gives.push_back(pair(c.rank(), r));
          gets.push_back(pair(r, c.rank()));
          given += gives.back();
          got += gets.back();
        }
        auto const sent = values<T>(c.rank(), given);
        expected.clear();
        for (int from = 0; from < c.size(); ++from) {
          index_t begin = 0;
          for (int to = 0; to < c.rank(); ++to) begin += pair(from, to);
          for (index_t i = 0; i < gets[at(from)]; ++i) expected.push_back(value<T>(from, begin + i));
        }
        out.assign(at(got), T{});
        later.assign(at(got), T{});
        c.all_to_all_v(std::span(out), gets, sent, gives);
        c.start_all_to_all_v(std::span(later), gets, sent, gives).wait();
        CHECK(same_bits(out, expected));
        CHECK(same_bits(later, expected));
      }
    });
  });
}

TEST_CASE("messages round a ring arrive by tag, whichever is asked for first") {
  model::run([](auto& c) {
    auto const next = (c.rank() + 1) % c.size(), previous = (c.rank() + c.size() - 1) % c.size();
    for (auto n : sizes) {
      auto const a = values<float>(c.rank(), n), b = values<float>(c.rank() + 100, n);
      std::vector<float> from_a(at(n)), from_b(at(n));
      auto second = c.start_receive(std::span(from_b), previous, 2);
      auto first = c.start_receive(std::span(from_a), previous, 1);
      auto sent = c.start_send(std::span(a), next, 1);
      c.send(std::span(b), next, 2);
      first.wait();
      sent.wait();
      second.wait();
      CHECK(same_bits(from_a, values<float>(previous, n)));
      CHECK(same_bits(from_b, values<float>(previous + 100, n)));
    }
    if (c.size() > 1) {
      std::vector<float> data(3);
      if (c.rank() == 0) c.send(std::span<float const>(data), 1, 7);
      if (c.rank() == 1) c.receive(std::span(data), 0, 7);
    }
  });
}

TEST_CASE("requests may be waited for in any order, tested, moved, and mixed with blocking calls") {
  model::run([](auto& c) {
    using request = typename std::remove_reference_t<decltype(c)>::request;
    for (auto n : {index_t{3}, index_t{1031}, index_t{5003}}) {
      std::vector<std::vector<float>> data;
      std::vector<std::vector<std::int32_t>> numbers;
      for (int k = 0; k < 4; ++k) data.push_back(values<float>(c.rank(), n + k));
      for (int k = 0; k < 3; ++k) numbers.push_back(values<std::int32_t>(c.rank(), n + k));
      std::vector<request> pending;
      for (int k = 0; k < 3; ++k) {
        pending.push_back(c.start_all_reduce(std::span(data[at(k)])));
        pending.push_back(c.start_all_reduce(std::span(numbers[at(k)])));
        if (k == 1) CHECK(c.all_reduce(index_t{1}) == c.size()); // overtakes those in flight
      }
      c.all_reduce(std::span(data[3]));
      CHECK(same_bits(data[3], reduced<float>(c.size(), n + 3, reduction::sum)));
      if (c.rank() % 3 == 0) {
        for (auto& each : pending) each.wait();
      } else if (c.rank() % 3 == 1) {
        for (auto each = pending.rbegin(); each != pending.rend(); ++each) each->wait();
      } else {
        request moved = std::move(pending[2]);
        while (!moved.test()) continue;
        pending[2] = std::move(moved);
        for (auto& each : pending) each.wait();
      }
      for (auto& each : pending) CHECK(each.test());
      for (int k = 0; k < 3; ++k) {
        CHECK(same_bits(data[at(k)], reduced<float>(c.size(), n + k, reduction::sum)));
        CHECK(same_bits(numbers[at(k)], reduced<std::int32_t>(c.size(), n + k, reduction::sum)));
      }
    }
    request().wait(); // an empty one has ended
    auto left = values<float>(c.rank(), 700);
    { auto forgotten = c.start_all_reduce(std::span(left)); }
    CHECK(same_bits(left, reduced<float>(c.size(), 700, reduction::sum)));
  });
}

TEST_CASE("split makes groups by color, ordered by key, that work side by side") {
  model::run([](auto& c) {
    auto const color = c.rank() % 2;
    auto part = c.split(color, -c.rank());
    auto const members = (c.size() + 1 - color) / 2;
    CHECK(part.size() == members);
    CHECK(part.rank() == members - 1 - c.rank() / 2);
    std::vector<std::int32_t> ranks(at(members));
    std::int32_t const mine[] = {c.rank()};
    part.all_gather(std::span(ranks), mine);
    for (int r = 0; r < members; ++r) CHECK(ranks[at(r)] == 2 * (members - 1 - r) + color);
    auto again = part.split(0, part.rank());
    CHECK(again.all_reduce(1) == members);
    CHECK(c.all_reduce(1) == c.size());
    CHECK(id_of([&] { (void)c.split(-1, 0); }) == "E-comm-004");
  });
}

TEST_CASE("lengths, ranks, tags and overlaps that do not fit are errors before anything is sent") {
  model::run([](auto& c) {
    std::vector<float> three(3), more(at(3 * c.size() + 1));
    auto const s = std::span(three), m = std::span(more);
    std::vector<index_t> counts(at(c.size()), 1), wrong(at(c.size() + 1), 1), negative(at(c.size()), -1);
    CHECK(id_of([&] { c.all_reduce(s, more); }) == "E-comm-001");
    CHECK(id_of([&] { c.reduce(s, three, c.size()); }) == "E-comm-002");
    CHECK(id_of([&] { c.broadcast(s, -1); }) == "E-comm-002");
    CHECK(id_of([&] { c.reduce_scatter(s, more); }) == "E-comm-001");
    CHECK(id_of([&] { c.reduce_scatter_v(s, three, wrong); }) == "E-comm-001");
    CHECK(id_of([&] { c.all_gather_v(s, three, negative); }) == "E-comm-003");
    CHECK(id_of([&] { c.all_gather(m, three); }) == "E-comm-001");
    CHECK(id_of([&] { c.all_to_all(m, three); }) == "E-comm-001");
    CHECK(id_of([&] { c.scatter_v(s, more, counts, 0); }) == "E-comm-001");
    CHECK(id_of([&] { c.all_to_all(m.first(at(c.size())), m.first(at(c.size()))); }) == "E-comm-005");
    CHECK(id_of([&] { c.all_reduce(m.first(2), m.subspan(1, 2)); }) == "E-comm-005");
    CHECK(id_of([&] { c.send(s, 0, -1); }) == "E-comm-006");
    CHECK(id_of([&] { c.receive(s, c.size(), 0); }) == "E-comm-002");
    CHECK(c.all_reduce(1) == c.size());
  });
}

TEST_CASE("an integer sum that does not fit is an error on every rank, and the communicator goes on") {
  model::run([](auto& c) {
    if (c.size() == 1) return;
    for (auto n : {index_t{1}, index_t{5003}}) {
      std::vector<std::int32_t> data(at(n), 1);
      data.back() = c.rank() == 0 ? 2147483647 : 1;
      CHECK(id_of([&] { c.all_reduce(std::span(data)); }) == "E-comm-012");
      std::vector<std::uint8_t> bytes(at(n * c.size()), 200), part(at(n));
      CHECK(id_of([&] { c.reduce_scatter(std::span(part), bytes); }) == "E-comm-012");
      std::vector<std::int64_t> low(at(n), -5000000000000000000), sum(at(n));
      CHECK(id_of([&] { c.reduce(std::span(sum), low, 0); }) == "E-comm-012");
      auto pending = c.start_all_reduce(std::span(low));
      CHECK(c.all_reduce(1) == c.size());
      CHECK(id_of([&] { pending.wait(); }) == "E-comm-012");
    }
    CHECK(c.all_reduce(1) == c.size());
  });
}

TEST_CASE("a NaN on any rank is a NaN on all, in sums, maxima and minima") {
  model::run([](auto& c) {
    for (auto operation : {reduction::sum, reduction::max, reduction::min})
      for (int from = 0; from < c.size(); ++from) {
        auto const mine = c.rank() == from ? std::nanf("") : static_cast<float>(c.rank());
        CHECK(std::isnan(c.all_reduce(mine, {.operation = operation})));
        CHECK(std::isnan(static_cast<float>(c.all_reduce(bf16(mine), {.operation = operation}))));
      }
  });
}

TEST_CASE("the meter counts calls and payload of each kind, and time when asked") {
  model::run([](auto& c) {
    std::vector<float> data(100), all(at(100 * c.size()));
    c.meter().reset();
    c.all_reduce(std::span(data));
    c.all_reduce(std::span(data), {.order = summation::native});
    c.all_gather(std::span(all), data);
    c.meter().time_calls(true);
    c.start_broadcast(std::span(data), 0).wait();
    CHECK(c.meter().of(comm::collective::all_reduce).calls == 2);
    CHECK(c.meter().of(comm::collective::all_reduce).bytes == 800);
    CHECK(c.meter().of(comm::collective::all_gather).bytes == 400 * c.size());
    CHECK(c.meter().of(comm::collective::all_gather).seconds == 0);
    CHECK(c.meter().of(comm::collective::broadcast).calls == 1);
    CHECK(c.meter().of(comm::collective::broadcast).seconds > 0);
    CHECK(c.meter().total().calls == 4);
    c.meter().reset();
    CHECK(c.meter().total().calls == 0);
  });
}

TEST_CASE("the meter counts what a rank sends by the usual algorithms, kind by kind") {
  model::run([](auto& c) {
    using comm::collective;
    index_t const n = c.size(), r = c.rank(), last = n - 1;
    std::vector<float> part(100), all(at(100 * n)), other(at(100 * n));
    auto const p = std::span(part), a = std::span(all), o = std::span(other);
    // Rank s gives 10 + 3 s elements to each rank, or gathers as many.
    std::vector<index_t> mine(at(n), 10 + 3 * r), each;
    index_t odd = 0;
    for (index_t s = 0; s < n; ++s) each.push_back(10 + 3 * s), odd += each.back();
    auto const gets = c.rank() == 0 ? last : r - 1, gives = (r + 1) % n;
    comm::reduce_options const tree{.order = summation::binary_tree};
    auto const sent_by = [&](collective what, auto call) {
      c.meter().reset();
      call();
      CHECK(c.meter().of(what).calls == 1);
      return c.meter().of(what).sent;
    };
    auto const root = narrow<int>(last);
    bool const is_root = r == last;
    struct row {
      collective what;
      index_t measured, expected;
    };
    row const table[] = {
        {collective::all_reduce, sent_by(collective::all_reduce, [&] { c.all_reduce(p.first(7)); }),
         2 * 28 * last / n},
        {collective::all_reduce, sent_by(collective::all_reduce, [&] { c.all_reduce(a, tree); }),
         2 * 400 * last},
        {collective::reduce_scatter,
         sent_by(collective::reduce_scatter, [&] { c.start_reduce_scatter(p, a).wait(); }), 400 * last},
        {collective::reduce_scatter,
         sent_by(collective::reduce_scatter,
                 [&] { c.reduce_scatter_v(p.first(at(each[at(r)])), a.first(at(odd)), each); }),
         4 * odd * last / n},
        {collective::all_gather, sent_by(collective::all_gather, [&] { c.all_gather(a, p); }), 400 * last},
        {collective::all_gather,
         sent_by(collective::all_gather,
                 [&] { c.start_all_gather_v(a.first(at(odd)), p.first(at(each[at(r)])), each).wait(); }),
         4 * odd * last / n},
        {collective::broadcast, sent_by(collective::broadcast, [&] { c.broadcast(p, 0); }), n > 1 ? 400 : 0},
        {collective::reduce, sent_by(collective::reduce, [&] { c.reduce(p, p, root); }), n > 1 ? 400 : 0},
        {collective::all_to_all, sent_by(collective::all_to_all, [&] { c.all_to_all(o, a); }), 400 * last},
        {collective::all_to_all,
         sent_by(collective::all_to_all,
                 [&] { c.all_to_all_v(o.first(at(odd)), each, a.first(at((10 + 3 * r) * n)), mine); }),
         4 * (10 + 3 * r) * last},
        {collective::gather, sent_by(collective::gather, [&] { c.gather(a, p, root); }), is_root ? 0 : 400},
        {collective::gather,
         sent_by(collective::gather,
                 [&] { c.gather_v(a.first(at(odd)), p.first(at(each[at(r)])), each, root); }),
         is_root ? 0 : 4 * each[at(r)]},
        {collective::scatter, sent_by(collective::scatter, [&] { c.scatter(p, a, root); }),
         is_root ? 400 * last : 0},
        {collective::send,
         sent_by(collective::send,
                 [&] {
                   auto arrives = c.start_receive(o.first(5), narrow<int>(gets), 1);
                   c.send(a.first(5), narrow<int>(gives), 1);
                   arrives.wait();
                 }),
         20},
        {collective::barrier, sent_by(collective::barrier, [&] { c.barrier(); }), 0},
    };
    for (auto const& each_kind : table) {
      CAPTURE(name_of(each_kind.what));
      CHECK(each_kind.measured == each_kind.expected);
    }
    c.meter().reset();
    c.all_reduce(p);
    c.all_gather(a, p);
    CHECK(c.meter().total().sent == 2 * 400 * last / n + 400 * last);
  });
}

TEST_CASE("exchange memory is counted, stays within its formula, and is not taken anew") {
  model::run([](auto& c) {
    auto part = c.split(0, 0);
    auto const& memory = part.memory();
    auto data = values<bf16>(c.rank(), 5003);
    part.all_reduce(std::span(data));
    auto const taken = memory.allocations();
    CHECK(memory.current(memory_kind::communication) <= part.template scratch_bytes<bf16>(5003, c.size()));
    for (int k = 0; k < 3; ++k) {
      part.all_reduce(std::span(data));
      part.start_all_reduce(std::span(data)).wait();
    }
    CHECK(memory.allocations() == taken);
  });
}

TEST_CASE(
    "at the checked level outputs lent to a request read as NaN, and touching what is lent is an error") {
  model::run(
      [](auto& c) {
        auto const mine = values<float>(c.rank(), 1031);
        auto const expected = reduced<float>(c.size(), 1031, reduction::sum);
        std::vector<float> out(1031);
        auto in_place = mine;
        auto first = c.start_all_reduce(std::span(out), mine);
        auto second = c.start_all_reduce(std::span(in_place));
        CHECK(std::isnan(out[0]));
        CHECK(std::isnan(in_place[1030]));
        second.wait();
        first.wait();
        CHECK(same_bits(out, expected));
        CHECK(same_bits(in_place, expected));

        // After the barrier no other rank reads these buffers any more: what follows is misuse, not a race.
        auto written = c.start_all_reduce(std::span(out), mine);
        c.barrier();
        out[500] = 1;
        CHECK(id_of([&] { written.wait(); }) == "E-comm-014");
        auto changing = mine;
        auto changed = c.start_all_reduce(std::span(out), changing);
        c.barrier();
        changing[7] += 1;
        CHECK(id_of([&] { changed.wait(); }) == "E-comm-015");
        CHECK(c.all_reduce(1) == c.size());
      },
      {.checked = true});
}

TEST_CASE("a checked communicator does all that others do") {
  model::run(
      [](auto& c) {
        CHECK(c.options().checked);
        for (auto n : {index_t{0}, index_t{7}, index_t{1031}}) {
          auto const counts = uneven(c.size(), n);
          auto const begin = begin_of(counts, c.rank()), length = counts[at(c.rank())];
          auto sum = values<bf16>(c.rank(), n);
          c.start_reduce_scatter_v(std::span(sum).subspan(at(begin), at(length)), sum, counts).wait();
          c.start_all_gather_v(std::span(sum), std::span(sum).subspan(at(begin), at(length)), counts).wait();
          CHECK(same_bits(sum, reduced<bf16>(c.size(), n, reduction::sum)));
          auto data = values<float>(c.rank(), n);
          c.start_broadcast(std::span(data), c.size() - 1).wait();
          CHECK(same_bits(data, values<float>(c.size() - 1, n)));
          auto const all = values<float>(c.rank(), n * c.size());
          std::vector<float> out(all.size());
          std::vector<index_t> const equal(at(c.size()), n);
          c.start_all_to_all_v(std::span(out), equal, all, equal).wait();
          c.all_reduce(std::span(out), {.order = summation::native});
          c.barrier();
        }
        auto part = c.split(c.rank() % 2, 0);
        CHECK(part.options().checked);
        CHECK(part.all_reduce(1) == (c.size() + 1 - c.rank() % 2) / 2);
      },
      {.checked = true});
}

} // namespace conformance

#endif
