#include <tessera/optim/sgd.hpp>

#include "fixture.hpp"

using namespace tessera;
using namespace fixture;

namespace {

/// The published algorithm in float64, one element at a time.
void reference_step(std::vector<double>& weight, std::vector<double>& velocity,
                    std::vector<double> const& gradients, std::vector<layout::range> const& mask,
                    optim::sgd_options const& o, optim::step_values const& s) {
  for (std::size_t i = 0; i < weight.size(); ++i) {
    auto g = gradients[i] * s.gradient_scale;
    if (decays(mask, static_cast<index_t>(i))) g += o.weight_decay * weight[i];
    velocity[i] = o.momentum * velocity[i] + g;
    weight[i] -= s.learning_rate * (o.nesterov ? g + o.momentum * velocity[i] : velocity[i]);
  }
}

} // namespace

TEST_CASE_TEMPLATE("SGD follows the float64 algorithm with and without momentum and look-ahead", T, float,
                   bf16, fp16) {
  exec::host ex({.threads = 2});
  for (auto const& options : {optim::sgd_options{.momentum = 0, .weight_decay = 0.1},
                              optim::sgd_options{.momentum = 0.9, .weight_decay = 0},
                              optim::sgd_options{.momentum = 0.9, .weight_decay = 0.1, .nesterov = true}})
    for (auto n : hostile_sizes) {
      CAPTURE(n);
      auto const mask = uneven_mask(n);
      auto weights = normal<T>(n, 1);
      optim::sgd<exec::host, T> o(ex, n, options, mask);
      o.start_from(ex, std::span<T const>(weights));
      auto expected = reference::doubles(std::span<T>(weights));
      std::vector<double> velocity(expected.size());
      for (index_t step = 1; step <= 5; ++step) {
        auto const gradients = normal<T>(n, static_cast<std::uint64_t>(10 + step));
        optim::step_values const values{.step = step, .learning_rate = 0.02, .gradient_scale = 0.5};
        o.step(ex, std::span(weights), std::span<T const>(gradients), values);
        reference_step(expected, velocity, reference::doubles(std::span<T const>(gradients)), mask, options,
                       values);
      }
      if constexpr (std::is_same_v<T, float>)
        CHECK(reference::max_relative_error(std::span<T>(weights), expected) < 1e-6);
      else
        CHECK(reference::max_relative_error(o.state().front().values, expected) < 1e-6);
      if (options.momentum != 0) {
        CHECK(o.state().back().name == "momentum_buffer");
        CHECK(reference::max_relative_error(o.state().back().values, velocity) < 1e-6);
      }
    }
}

TEST_CASE("Two steps of momentum by hand") {
  exec::host ex({.threads = 1});
  std::vector<float> weights = {1}, gradients = {0.5f};
  optim::sgd<exec::host, float> o(ex, 1, {.momentum = 0.5}, {});
  optim::step_values const values{.step = 1, .learning_rate = 0.25};
  o.step(ex, std::span(weights), std::span<float const>(gradients), values);
  CHECK(weights[0] == 0.875f); // velocity 0.5
  o.step(ex, std::span(weights), std::span<float const>(gradients), values);
  CHECK(weights[0] == 0.6875f); // velocity 0.75
}

TEST_CASE("State is kept only where it is needed, and counted") {
  exec::host ex({.threads = 1});
  memory_meter meter;
  memory_account const account{&meter, memory_kind::optimizer_state};
  optim::sgd<exec::host, float> plain(ex, 100, {.momentum = 0}, {}, account);
  CHECK(meter.current() == 0);
  CHECK(plain.state().empty());
  optim::sgd<exec::host, bf16> full(ex, 100, {}, {}, account);
  CHECK(meter.current(memory_kind::optimizer_state) == 100 * full.state_bytes({}));
  CHECK(full.state_bytes({}) == 8);
  CHECK(full.state_bytes({.momentum = 0}) == 4);
}

TEST_CASE("Looking ahead without momentum is refused") {
  exec::host ex({.threads = 1});
  CHECK(id_thrown_by<config_error>([&] {
          optim::sgd<exec::host, float>(ex, 8, {.momentum = 0, .nesterov = true}, {});
        }) == "E-optim-008");
}
