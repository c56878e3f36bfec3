/// What the tests of optim/ share: inputs of any storage type, and the sizes that break loops.
#ifndef TESSERA_TESTS_OPTIM_FIXTURE_HPP
#define TESSERA_TESTS_OPTIM_FIXTURE_HPP

#include <doctest/doctest.h>

#include <string>
#include <vector>

#include <support/reference.hpp>
#include <tessera/exec/host.hpp>
#include <tessera/layout/shard.hpp>

namespace fixture {

using namespace tessera;

/// Empty, single, prime, around a vector, around the chunk of a thread.
inline std::vector<index_t> const hostile_sizes = {0, 1, 7, 31, 1009, 4095, 4096, 4097, 12289};

/// Decayed ranges with borders at no multiple of anything, one of them of a single element, the last one up
/// to the end; and nothing for a shard too small.
inline std::vector<layout::range> uneven_mask(index_t n) {
  if (n < 31) return {{n / 2, n}};
  return {{1, 2}, {3, n / 3}, {n / 2 + 1, n - 5}, {n - 3, n}};
}

inline bool decays(std::vector<layout::range> const& mask, index_t i) {
  for (auto r : mask)
    if (i >= r.begin && i < r.end) return true;
  return false;
}

template <class T>
std::vector<T> normal(index_t n, std::uint64_t seed, float scale = 1) {
  std::vector<T> out(static_cast<std::size_t>(n));
  reference::fill_normal(std::span<T>(out), seed, scale);
  return out;
}

/// Runs `f`, which must throw an E, and returns its id.
template <class E, class F>
std::string id_thrown_by(F&& f) {
  try {
    f();
  } catch (E const& e) {
    return e.id();
  }
  return "nothing was thrown";
}

} // namespace fixture

#endif
