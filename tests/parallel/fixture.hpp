/// What the tests of parallel/ share: a model without layers, whose gradients are small integers. Sums of
/// those are exact in any order, so that every way of sharing the work must give the same bits.
#ifndef TESSERA_TESTS_PARALLEL_FIXTURE_HPP
#define TESSERA_TESTS_PARALLEL_FIXTURE_HPP

#include <doctest/doctest.h>

#include <cstring>
#include <string>
#include <vector>

#include <support/reference.hpp>
#include <tessera/comm/self.hpp>
#include <tessera/comm/threads.hpp>
#include <tessera/exec/host.hpp>
#include <tessera/layout/shard.hpp>

namespace fixture {

using namespace tessera;

/// Unit blocks one after another.
inline std::vector<layout::range> units_of(std::vector<index_t> const& sizes) {
  std::vector<layout::range> units;
  index_t end = 0;
  for (auto size : sizes) {
    units.push_back({end, end + size});
    end += size;
  }
  return units;
}

/// Sizes that leave some of four ranks without an element, units smaller than a granule of ownership, an
/// empty unit, and borders at no multiple of anything.
inline std::vector<layout::range> hostile_units() {
  return units_of({1000, 7, 0, 33, 64, 4099, 1});
}

/// Element e of sample s's gradient in step t: an integer from -4 to 4, often 0.
inline float gradient_of(index_t step, index_t sample, index_t element) {
  auto const bits = philox(static_cast<std::uint64_t>(step), static_cast<std::uint64_t>(sample))
                        .bits(static_cast<std::uint64_t>(element));
  return static_cast<float>(static_cast<int>(bits % 9) - 4);
}

/// Calls f(communicator) on `ranks` ranks: threads, or for 0 the communicator that has one rank only.
template <class F>
void on_ranks(int ranks, F f) {
  if (ranks == 0) {
    comm::self alone;
    f(alone);
  } else {
    comm::run_threads(ranks, [&](comm::threads& c) { f(c); });
  }
}

template <class T>
bool same_bits(std::vector<T> const& a, std::vector<T> const& b) {
  return a.size() == b.size() && (a.empty() || std::memcmp(a.data(), b.data(), a.size() * sizeof(T)) == 0);
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
