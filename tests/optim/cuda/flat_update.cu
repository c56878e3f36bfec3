#include <tessera/optim/cuda/flat_update.cuh>

#include <cmath>
#include <type_traits>

#include <tessera/optim/adamw.hpp>
#include <tessera/optim/sgd.hpp>

#include "optim/fixture.hpp"
#include "support/device_rows.hpp"

using namespace tessera;
using namespace fixture;
using test::device_rows;
using test::lying;
using test::lyings;

// Named: what a kernel is made from must have a name outside of its file.
namespace flat_update_test {

/// Adds the decay and counts the visit.
struct visit {
  static constexpr int slots = 1;
  TESSERA_HOST_DEVICE float operator()(float weight, float gradient, float decay, float& visits) const {
    visits += 1;
    return weight + gradient + decay;
  }
};

} // namespace flat_update_test

namespace {

using flat_update_test::visit;

using device = exec::cuda_memory;

template <class T_, class G_>
struct storage {
  using T = T_;
  using G = G_;
};

template <class T>
tensor<T, 1> constant(index_t n, float value) {
  tensor<T, 1> out({n});
  for (auto& v : out.span()) v = T(value);
  return out;
}

void check_visits(index_t n, std::vector<layout::range> const& mask, lying how) {
  CAPTURE(n);
  exec::cuda ex;
  device_rows<float> weights(ex, constant<float>(n, 1), how, 0),
      gradients(ex, constant<float>(n, 10), how, 1), visits(ex, constant<float>(n, 0), how, 2);
  optim::flat_update(ex,
                     optim::flat_shard<float, float, 1, device>{.weights = weights.span(),
                                                                .gradients = gradients.span(),
                                                                .state = {visits.span()},
                                                                .decayed = mask},
                     visit{}, 100.0f);
  auto const after = weights.read(ex), visited = visits.read(ex);
  bool right = true;
  for (index_t i = 0; i < n; ++i)
    right = right && visited(0, i) == 1 && after(0, i) == (decays(mask, i) ? 111 : 11);
  CHECK(right);
}

/// Three steps of an optimizer on CUDA and on the host, from the same start.
template <template <class, class> class Optimizer, class S, class Options>
void check_optimizer(index_t n, Options options, lying how, double tolerance) {
  using T = typename S::T;
  using G = typename S::G;
  CAPTURE(n);
  exec::cuda ex;
  exec::host host({.threads = 1});
  auto const mask = uneven_mask(n);
  auto const start = reference::normal<T, 1>({n}, 1);
  tensor<T, 1> host_weights({n});
  for (index_t i = 0; i < n; ++i) host_weights(i) = start(i);
  device_rows<T> weights(ex, start, how, 0);
  Optimizer<exec::cuda, T> on_device(ex, n, options, mask);
  Optimizer<exec::host, T> on_host(host, n, options, mask);
  on_device.start_from(ex, memory_span<T const, device>(weights.span()));
  on_host.start_from(host, std::span<T const>(host_weights.span()));
  for (index_t step = 1; step <= 3; ++step) {
    auto const g = reference::normal<G, 1>({n}, static_cast<std::uint64_t>(10 + step), 3);
    device_rows<G> gradients(ex, g, how, 1);
    optim::step_values const values{.step = step, .learning_rate = 0.01, .gradient_scale = 0.25};
    on_device.step(ex, weights.span(), memory_span<G const, device>(gradients.span()), values);
    on_host.step(host, host_weights.span(), std::span<G const>(g.span()), values);
  }
  auto const device_state = on_device.state();
  auto const host_state = on_host.state();
  REQUIRE(device_state.size() == host_state.size());
  tensor<float, 1> fetched({n});
  for (std::size_t s = 0; s < host_state.size(); ++s) {
    CHECK(device_state[s].name == host_state[s].name);
    exec::copy(ex, fetched.span(), memory_span<float const, device>(device_state[s].values));
    CHECK(reference::max_relative_error(fetched, reference::doubles(host_state[s].values)) < 1e-6);
    if (host_state[s].name == "master") {
      // What is stored is the master rounded once.
      auto const stored = weights.read(ex);
      bool rounded = true;
      for (index_t i = 0; i < n; ++i)
        rounded = rounded && static_cast<float>(stored(0, i)) == static_cast<float>(T(fetched(i)));
      CHECK(rounded);
    }
  }
  CHECK(reference::max_relative_error(weights.read(ex), reference::doubles(host_weights.span())) < tolerance);
}

} // namespace

TEST_CASE(
    "every element is visited once, with the decay of the range it stands in, wherever the arrays lie") {
  for (auto n : {0, 1, 7, 31, 1009, 4097})
    for (auto how : lyings) check_visits(n, uneven_mask(n), how);
}

TEST_CASE("more decayed ranges than one kernel takes, empty ones among them") {
  std::vector<layout::range> mask;
  for (index_t i = 0; i < 500; ++i) mask.push_back({10 * i + i % 7, 10 * i + i % 7 + i % 3});
  for (auto how : lyings) check_visits(5003, mask, how);
  mask.resize(192); // exactly as many as one takes
  check_visits(5003, mask, lying::aligned);
}

TEST_CASE_TEMPLATE("AdamW steps as on the host, whatever the storage and wherever the arrays lie", S,
                   storage<float, float>, storage<bf16, float>, storage<bf16, bf16>, storage<fp16, fp16>,
                   storage<float, bf16>) {
  using T = typename S::T;
  for (auto n : {0, 1, 31, 1009})
    for (auto how : lyings)
      check_optimizer<optim::adamw, S>(n, optim::adamw_options{.beta2 = 0.999, .weight_decay = 0.2}, how,
                                       reference::tolerance<T>());
}

TEST_CASE_TEMPLATE("SGD steps as on the host, with momentum, with Nesterov's and without", S,
                   storage<float, float>, storage<bf16, float>) {
  using T = typename S::T;
  for (auto options : {optim::sgd_options{.momentum = 0.9, .weight_decay = 0.1},
                       optim::sgd_options{.momentum = 0.9, .weight_decay = 0.1, .nesterov = true},
                       optim::sgd_options{.momentum = 0, .weight_decay = 0.1}})
    for (auto how : lyings) check_optimizer<optim::sgd, S>(1009, options, how, reference::tolerance<T>());
}

TEST_CASE("AdamW follows the float64 algorithm") {
  exec::cuda ex;
  index_t const n = 257;
  auto const start = reference::normal<float, 1>({n}, 1), g = reference::normal<float, 1>({n}, 2);
  device_rows<float> weights(ex, start, lying::shifted, 0), gradients(ex, g, lying::shifted, 1);
  optim::adamw<exec::cuda, float> o(ex, n, {.weight_decay = 0.5}, {{0, 100}});
  auto expected = reference::doubles(start.span());
  auto const exact = reference::doubles(g.span());
  std::vector<double> first(expected.size()), second(expected.size());
  for (index_t step = 1; step <= 4; ++step) {
    o.step(ex, weights.span(), memory_span<float const, device>(gradients.span()),
           {.step = step, .learning_rate = 0.01, .gradient_scale = 0.5});
    for (std::size_t i = 0; i < expected.size(); ++i) {
      auto const d = 0.5 * exact[i];
      first[i] = 0.9 * first[i] + 0.1 * d;
      second[i] = 0.95 * second[i] + 0.05 * d * d;
      if (i < 100) expected[i] *= 1 - 0.01 * 0.5;
      expected[i] -= 0.01 * first[i] / (1 - std::pow(0.9, step)) /
                     (std::sqrt(second[i] / (1 - std::pow(0.95, step))) + 1e-8);
    }
  }
  CHECK(reference::max_relative_error(weights.read(ex), expected) < 1e-6);
}
