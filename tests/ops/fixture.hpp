/// What the tests of memory-bound operations share: sizes that break loops, pairs of storage types, and the
/// demand that results do not depend on the number of threads.
#ifndef TESSERA_TESTS_OPS_FIXTURE_HPP
#define TESSERA_TESTS_OPS_FIXTURE_HPP

#include <cstring>
#include <initializer_list>
#include <string>

#include <tessera/exec/host.hpp>

#include <doctest/doctest.h>

#include "ops/catalog.hpp"
#include "support/finite_difference.hpp"
#include "support/reference.hpp"
#include "support/thrown.hpp"

namespace fixture {

using namespace tessera;
using reference::numbers;

using catalog::counts;
using catalog::shapes;
using shape = catalog::rectangle;

/// Of activations and parameters, of the parameters' gradients, and of a residual stream.
template <class Storage, class Gradient, class Residual = Storage>
struct types {
  using T = Storage;
  using G = Gradient;
  using R = Residual;
};

/// The bytes of a tensor.
template <class T, int Rank>
std::string bits(tensor<T, Rank> const& x) {
  return {reinterpret_cast<char const*>(x.data()), static_cast<std::size_t>(x.size()) * sizeof(T)};
}

/// `run(ex)` returns the bytes of its results.
template <class F>
void same_bits_for_any_thread_count(F run) {
  exec::host one({.threads = 1}), two({.threads = 2}), five({.threads = 5});
  auto const expected = run(one);
  CHECK(run(two) == expected);
  CHECK(run(five) == expected);
  CHECK(run(five) == expected); // scratch memory that was used before changes nothing
}

/// A copy inside a wider matrix whose other elements are `padding`: rows that lie apart.
template <class T>
struct apart {
  tensor<T, 2> memory;
  view<T, 2> rows;

  explicit apart(tensor<T, 2> const& x, float padding = 77)
      : memory({x.extent(0), x.extent(1) + 5}), rows(memory.view().slice(1, 2, 2 + x.extent(1))) {
    for (auto& m : memory.span()) m = T(padding);
    for (index_t i = 0; i < x.extent(0); ++i)
      for (index_t j = 0; j < x.extent(1); ++j) rows(i, j) = x(i, j);
  }
  /// A packed copy of the rows.
  tensor<T, 2> packed() const {
    tensor<T, 2> x({rows.extent(0), rows.extent(1)});
    for (index_t i = 0; i < x.extent(0); ++i)
      for (index_t j = 0; j < x.extent(1); ++j) x(i, j) = rows(i, j);
    return x;
  }
  bool padding_is(float padding) const {
    for (index_t i = 0; i < memory.extent(0); ++i)
      for (index_t j = 0; j < memory.extent(1); ++j)
        if ((j < 2 || j >= 2 + rows.extent(1)) && static_cast<float>(memory(i, j)) != padding) return false;
    return true;
  }
};

template <class T, int Rank>
view<T, 1> flat(tensor<T, Rank>& x) {
  return x.view().template reshape<1>({x.size()});
}

} // namespace fixture

#endif
