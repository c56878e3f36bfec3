#include <tessera/parallel/global_norm.hpp>

#include "fixture.hpp"

using namespace tessera;
using namespace fixture;

namespace {

/// The norm on each of `ranks` ranks that all hold `gradients`.
template <class G>
std::vector<double> norms(int ranks, std::vector<G> const& gradients,
                          std::vector<layout::range> const& units) {
  std::vector<double> found(static_cast<std::size_t>(ranks));
  on_ranks(ranks, [&](auto& comm) {
    exec::host ex({.threads = 1});
    found[static_cast<std::size_t>(comm.rank())] =
        parallel::global_norm(comm, ex, std::span<G const>(gradients), units);
  });
  return found;
}

} // namespace

TEST_CASE_TEMPLATE("Each element counts once, whatever the number of ranks, and all ranks get the same bits",
                   G, float, bf16) {
  auto const units = hostile_units();
  std::vector<G> gradients(static_cast<std::size_t>(units.back().end));
  reference::fill_normal(std::span<G>(gradients), 3);
  double expected = 0;
  for (auto g : gradients) expected += static_cast<double>(static_cast<float>(g)) * static_cast<float>(g);
  for (int ranks : {1, 2, 3, 4, 8}) {
    CAPTURE(ranks);
    auto const found = norms(ranks, gradients, units);
    CHECK(found.front() == doctest::Approx(std::sqrt(expected)).epsilon(1e-12));
    for (auto norm : found) CHECK(norm == found.front());
  }
}

TEST_CASE("Shards are counted by the ranks that hold them, and stale copies elsewhere are not") {
  auto const units = hostile_units();
  for (int ranks : {1, 2, 3, 4}) {
    std::vector<double> found(static_cast<std::size_t>(ranks));
    on_ranks(ranks, [&](auto& comm) {
      std::vector<float> gradients(static_cast<std::size_t>(units.back().end), 1e6f);
      layout::ownership const who{comm.rank(), comm.size()};
      for (auto unit : units) {
        auto const mine = who.of(unit.size());
        std::fill_n(gradients.begin() + (unit.begin + mine.begin), mine.size(), 2.0f);
      }
      exec::host ex({.threads = 1});
      found[static_cast<std::size_t>(comm.rank())] =
          parallel::global_norm(comm, ex, std::span<float const>(gradients), units);
    });
    for (auto norm : found) CHECK(norm == std::sqrt(4.0 * static_cast<double>(units.back().end)));
  }
}

TEST_CASE("A NaN or infinity anywhere is seen by every rank") {
  auto const units = hostile_units();
  for (float bad : {NAN, INFINITY, -INFINITY})
    for (index_t at : {index_t{0}, index_t{1003}, units.back().end - 1}) {
      std::vector<float> gradients(static_cast<std::size_t>(units.back().end), 1.0f);
      gradients[static_cast<std::size_t>(at)] = bad;
      for (auto norm : norms(3, gradients, units)) CHECK_FALSE(std::isfinite(norm));
    }
}

TEST_CASE("Squares that fp32 cannot hold do not overflow") {
  std::vector<float> const gradients(64, 1e30f);
  for (auto norm : norms(2, gradients, units_of({64}))) CHECK(norm == doctest::Approx(8e30));
}

TEST_CASE("Clipping shortens what is longer than the limit and leaves the rest alone") {
  CHECK(parallel::clip_factor(4, 1) == 0.25);
  CHECK(parallel::clip_factor(1, 1) == 1);
  CHECK(parallel::clip_factor(0, 1) == 1);
  CHECK(parallel::clip_factor(1e9, 0) == 1);
}
