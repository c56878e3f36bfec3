#include <tessera/optim/flat_update.hpp>

#include "fixture.hpp"
#include <tessera/optim/detail/square_root.hpp>

using namespace tessera;
using namespace fixture;

namespace {

/// Adds the decay and counts the visit.
struct visit {
  static constexpr int slots = 1;
  float operator()(float weight, float gradient, float decay, float& visits) const {
    visits += 1;
    return weight + gradient + decay;
  }
};

} // namespace

TEST_CASE("Every element is visited once, with the decay of the range it stands in") {
  for (int threads : {1, 2, 5}) {
    exec::host ex({.threads = threads});
    for (auto n : hostile_sizes) {
      CAPTURE(n);
      auto const mask = uneven_mask(n);
      std::vector<float> weights(static_cast<std::size_t>(n), 1), gradients(weights.size(), 10),
          visits(weights.size());
      optim::flat_update(
          ex,
          optim::flat_shard<float, float, 1>{
              .weights = weights, .gradients = gradients, .state = {std::span(visits)}, .decayed = mask},
          visit{}, 100.0f);
      bool right = true;
      for (index_t i = 0; i < n; ++i)
        right = right && visits[static_cast<std::size_t>(i)] == 1 &&
                weights[static_cast<std::size_t>(i)] == (decays(mask, i) ? 111 : 11);
      CHECK(right);
    }
  }
}

TEST_CASE("Lengths that differ and masks out of order are refused") {
  exec::host ex({.threads = 1});
  std::vector<float> eight(8), seven(7);
  auto const run = [&](std::span<float> master, std::span<float> state, std::vector<layout::range> mask) {
    return [&ex, &eight, master, state, mask] {
      optim::flat_update(
          ex,
          optim::flat_shard<float, float, 1>{
              .weights = eight, .master = master, .gradients = eight, .state = {state}, .decayed = mask},
          visit{}, 1.0f);
    };
  };
  CHECK(id_thrown_by<size_error>(run({}, seven, {})) == "E-optim-001");
  CHECK(id_thrown_by<size_error>(run(seven, eight, {})) == "E-optim-001");
  CHECK(id_thrown_by<size_error>(run({}, eight, {{2, 4}, {3, 5}})) == "E-optim-002");
  CHECK(id_thrown_by<size_error>(run({}, eight, {{4, 3}})) == "E-optim-002");
  CHECK(id_thrown_by<size_error>(run({}, eight, {{-1, 3}})) == "E-optim-002");
  CHECK(id_thrown_by<size_error>([&] { optim::flat_copy(ex, eight, std::span<float const>(seven)); }) ==
        "E-optim-003");
}

TEST_CASE("The square root is within one unit in the last place of every normal number's") {
  double worst = 0;
  for (std::uint32_t bits = 0x00800000u; bits < 0x7f800000u; bits += 4099) {
    auto const x = std::bit_cast<float>(bits);
    auto const exact = std::sqrt(static_cast<double>(x));
    auto const nearest = static_cast<float>(exact);
    auto const unit = static_cast<double>(std::nextafter(nearest, INFINITY)) - static_cast<double>(nearest);
    worst = std::fmax(worst, std::fabs(static_cast<double>(optim::detail::square_root(x)) - exact) / unit);
  }
  CHECK(worst < 1.0);
  CHECK(optim::detail::square_root(0.0f) == 0.0f);
  for (auto x : {1e-45f, 1e-40f, 1.17e-38f}) {
    CHECK(optim::detail::square_root(x) > 0);
    CHECK(optim::detail::square_root(x) <= 1.0001f * std::sqrt(x));
  }
  CHECK(optim::detail::square_root(INFINITY) == INFINITY);
  CHECK(std::isnan(optim::detail::square_root(NAN)));
  static_assert(optim::detail::square_root(4.0f) == 2.0f);
}
