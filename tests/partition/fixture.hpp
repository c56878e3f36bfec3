/// What tests of redistributions share: tensors laid over ranks by plain loops in double, and the gradient of
/// a global scalar by finite differences. Nothing here asks the library where an element is, but for
/// layout::shard_of.
#ifndef TESSERA_TESTS_PARTITION_FIXTURE_HPP
#define TESSERA_TESTS_PARTITION_FIXTURE_HPP

#include <algorithm>
#include <vector>

#include <tessera/exec/host.hpp>
#include <tessera/layout/shard.hpp>
#include <tessera/partition/mesh.hpp>
#include <tessera/partition/placements.hpp>

#include "support/ranks.hpp"

namespace test {

using namespace tessera;
using namespace tessera::partition;

using numbers = std::vector<double>;

/// A matrix over a mesh under a partitioning.
struct laid_out {
  partitioning parts;
  layout::mesh_shape shape;
  index_t rows, columns;

  int ranks() const { return narrow<int>(shape.size()); }
  int coordinate(int rank, int i) const {
    return parts.axes[i] == axis::tensor    ? rank % shape.tensor
           : parts.axes[i] == axis::context ? rank / shape.tensor % shape.context
                                            : rank / (shape.tensor * shape.context) % shape.data;
  }

  /// Numbers, in the whole, of the elements that a rank holds, in its order.
  std::vector<index_t> elements(int rank) const {
    layout::range range[2] = {{0, rows}, {0, columns}};
    for (int i = 0; i < parts.size; ++i)
      if (parts.at[i].kind == placement_kind::shard) {
        auto& r = range[parts.at[i].dim];
        auto const part =
            layout::shard_of(r.size(), shape.size(parts.axes[i]), coordinate(rank, i), parts.at[i].granule);
        r = {r.begin + part.begin, r.begin + part.end};
      }
    std::vector<index_t> found;
    for (auto i = range[0].begin; i < range[0].end; ++i)
      for (auto j = range[1].begin; j < range[1].end; ++j) found.push_back(i * columns + j);
    return found;
  }
  /// Ranks `a` and `b` have the same coordinates along the axes of the given kind.
  bool agree(int a, int b, placement_kind kind) const {
    for (int i = 0; i < parts.size; ++i)
      if (parts.at[i].kind == kind && coordinate(a, i) != coordinate(b, i)) return false;
    return true;
  }
  bool first_of(int rank, placement_kind kind) const {
    for (int i = 0; i < parts.size; ++i)
      if (parts.at[i].kind == kind && coordinate(rank, i) != 0) return false;
    return true;
  }

  /// What each rank holds of the whole's values: small integers, and summands that add up to the value.
  std::vector<numbers> spread(numbers const& whole) const {
    std::vector<numbers> local(static_cast<std::size_t>(ranks()));
    for (int rank = 0; rank < ranks(); ++rank)
      for (auto e : elements(rank)) {
        double value = whole[static_cast<std::size_t>(e)];
        if (first_of(rank, placement_kind::partial)) {
          for (int other = 0; other < ranks(); ++other)
            if (other != rank && same_but_for_summands(rank, other)) value -= summand(other, e);
        } else {
          value = summand(rank, e);
        }
        local[static_cast<std::size_t>(rank)].push_back(value);
      }
    return local;
  }
  bool same_but_for_summands(int a, int b) const {
    return agree(a, b, placement_kind::replicate) && agree(a, b, placement_kind::invariant) &&
           agree(a, b, placement_kind::shard);
  }
  double summand(int rank, index_t e) const { // the same for ranks that differ in other axes
    index_t number = 0;
    for (int i = 0; i < parts.size; ++i)
      if (parts.at[i].sums()) number = number * 5 + coordinate(rank, i);
    return static_cast<double>((number * 7 + e * 3) % 5 - 2);
  }

  /// The whole as what rank `reader` sees of it: the sums over the partial axes. Elements that it does not
  /// hold are NaN.
  numbers seen_by(int reader, std::vector<numbers> const& local) const {
    numbers whole(static_cast<std::size_t>(rows * columns), 0.0);
    std::vector<bool> there(whole.size());
    for (int rank = 0; rank < ranks(); ++rank) {
      if (!same_but_for_summands(reader, rank)) continue;
      auto const mine = elements(rank);
      if (local[static_cast<std::size_t>(rank)].size() != mine.size()) FAIL("a part of another size");
      for (std::size_t k = 0; k < mine.size(); ++k) {
        whole[static_cast<std::size_t>(mine[k])] += local[static_cast<std::size_t>(rank)][k];
        there[static_cast<std::size_t>(mine[k])] = true;
      }
    }
    for (std::size_t e = 0; e < whole.size(); ++e)
      if (!there[e]) whole[e] = __builtin_nan("");
    return whole;
  }

  /// A scalar of the whole program: every use of a value adds its own term. Along a replicate axis each rank
  /// uses its copy in its own way; along an invariant one all do the same once; summands are used as a sum.
  double use(int rank, index_t e) const {
    index_t number = 1;
    for (int i = 0; i < parts.size; ++i)
      if (parts.at[i].kind == placement_kind::replicate) number = number * 3 + coordinate(rank, i);
    return static_cast<double>((number * 11 + e * 5) % 7 - 3) / 4;
  }
  double scalar(std::vector<numbers> const& local) const {
    double sum = 0;
    for (int rank = 0; rank < ranks(); ++rank) {
      if (!first_of(rank, placement_kind::invariant) || !first_of(rank, placement_kind::partial)) continue;
      auto const whole = seen_by(rank, local);
      for (auto e : elements(rank)) {
        auto const v = whole[static_cast<std::size_t>(e)];
        sum += use(rank, e) * (v + 0.125 * v * v);
      }
    }
    return sum;
  }
  /// What a rank's backward of that gives: the gradient of its own uses.
  std::vector<numbers> gradient_of_uses(numbers const& whole) const {
    std::vector<numbers> local(static_cast<std::size_t>(ranks()));
    for (int rank = 0; rank < ranks(); ++rank)
      for (auto e : elements(rank))
        local[static_cast<std::size_t>(rank)].push_back(use(rank, e) *
                                                        (1 + 0.25 * whole[static_cast<std::size_t>(e)]));
    return local;
  }
};

/// The placements of the gradient.
inline partitioning dual_of(partitioning parts) {
  for (int i = 0; i < parts.size; ++i) {
    if (parts.at[i].kind == placement_kind::replicate)
      parts.at[i] = partial<>::value;
    else if (parts.at[i].sums())
      parts.at[i] = replicate::value;
  }
  return parts;
}

/// d scalar(to) / d local values of `from`, by central differences: what is moved is the element at `k` of
/// `rank` and its copies, all of which stay equal. The whole that `from` stands for is laid out as `to`.
inline double finite_difference(laid_out const& from, laid_out const& to, std::vector<numbers> const& local,
                                int rank, std::size_t k) {
  auto const at = [&](double step) {
    auto moved = local;
    for (int other = 0; other < from.ranks(); ++other) {
      if (!from.agree(rank, other, placement_kind::partial) ||
          !from.agree(rank, other, placement_kind::shard))
        continue;
      moved[static_cast<std::size_t>(other)][k] += step;
    }
    // The whole: every element from some rank that has it.
    numbers whole(static_cast<std::size_t>(from.rows * from.columns), __builtin_nan(""));
    for (int reader = 0; reader < from.ranks(); ++reader) {
      auto const part = from.seen_by(reader, moved);
      for (std::size_t i = 0; i < part.size(); ++i)
        if (part[i] == part[i]) whole[i] = part[i];
    }
    return to.scalar(to.spread(whole));
  };
  return (at(0.5) - at(-0.5)) / 1.0; // quadratic: central differences are exact
}

/// Each reader sees the whole's values in what it holds.
inline void check_value(laid_out const& to, std::vector<numbers> const& local, numbers const& whole) {
  int wrong = 0;
  for (int reader = 0; reader < to.ranks(); ++reader) {
    auto const seen = to.seen_by(reader, local);
    for (auto e : to.elements(reader))
      if (!(seen[static_cast<std::size_t>(e)] == whole[static_cast<std::size_t>(e)])) ++wrong;
  }
  CHECK(wrong == 0);
}

/// The gradient that came back, summed over a replicated input's copies, is the finite difference.
inline void check_gradient(laid_out const& from, laid_out const& to, std::vector<numbers> const& gradient,
                           numbers const& whole) {
  auto const input = from.spread(whole);
  laid_out const placed{dual_of(from.parts), from.shape, from.rows, from.columns};
  double worst = 0;
  for (int rank = 0; rank < from.ranks(); ++rank) {
    auto const seen = placed.seen_by(rank, gradient);
    auto const mine = from.elements(rank);
    for (std::size_t k = 0; k < mine.size(); ++k) {
      auto const off = __builtin_fabs(seen[static_cast<std::size_t>(mine[k])] -
                                      finite_difference(from, to, input, rank, k));
      if (!(off <= worst)) worst = off == off ? off : __builtin_inf();
    }
  }
  CHECK(worst < 1e-4); // of gradients of size 1, in fp32
}

/// Values of the whole: small integers, exact in every storage type.
inline numbers whole_values(index_t n) {
  numbers values;
  for (index_t i = 0; i < n; ++i) values.push_back(static_cast<double>((i * 5 + 2) % 9 - 4));
  return values;
}

/// What the meters of a mesh's different communicators say was sent.
inline index_t sent_along(mesh<comm::threads>& on) {
  std::vector<comm::threads*> groups{&on.world()};
  for (auto axes :
       {axis_set(axis::data), axis_set(axis::context), axis_set(axis::tensor), axis::data | axis::context})
    if (std::find(groups.begin(), groups.end(), &on.along(axes)) == groups.end())
      groups.push_back(&on.along(axes));
  index_t bytes = 0;
  for (auto* each : groups) bytes += each->meter().total().sent;
  return bytes;
}

/// Runs body(world, mesh, ex) on the mesh's ranks.
template <class Body>
void on_mesh(layout::mesh_shape const& shape, Body body) {
  comm::run_threads(narrow<int>(shape.size()),
                    [&](comm::threads& world) {
                      mesh on(world, shape);
                      exec::host ex({.threads = 1});
                      body(world, on, ex);
                    },
                    {.stall_limit = 20});
}

} // namespace test

#endif
