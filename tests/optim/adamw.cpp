#include <tessera/optim/adamw.hpp>

#include "fixture.hpp"

using namespace tessera;
using namespace fixture;

namespace {

/// The published algorithm in float64, one element at a time.
struct adamw_reference {
  std::vector<double> weight, first, second;

  adamw_reference(std::vector<double> start)
      : weight(std::move(start)), first(weight.size()), second(weight.size()) {}

  void step(std::vector<double> const& gradients, std::vector<layout::range> const& mask,
            optim::adamw_options const& o, optim::step_values const& s) {
    for (std::size_t i = 0; i < weight.size(); ++i) {
      auto const g = gradients[i] * s.gradient_scale;
      first[i] = o.beta1 * first[i] + (1 - o.beta1) * g;
      second[i] = o.beta2 * second[i] + (1 - o.beta2) * g * g;
      auto const m = first[i] / (1 - std::pow(o.beta1, static_cast<double>(s.step)));
      auto const v = second[i] / (1 - std::pow(o.beta2, static_cast<double>(s.step)));
      if (decays(mask, static_cast<index_t>(i))) weight[i] *= 1 - s.learning_rate * o.weight_decay;
      weight[i] -= s.learning_rate * m / (std::sqrt(v) + o.epsilon);
    }
  }
};

template <class T_, class G_>
struct storage {
  using T = T_;
  using G = G_;
};

} // namespace

TEST_CASE_TEMPLATE("AdamW follows the float64 algorithm over ten steps, whatever the storage and the size", S,
                   storage<float, float>, storage<bf16, float>, storage<bf16, bf16>, storage<fp16, fp16>,
                   storage<float, bf16>) {
  using T = typename S::T;
  using G = typename S::G;
  exec::host ex({.threads = 2});
  for (auto n : hostile_sizes) {
    CAPTURE(n);
    auto const mask = uneven_mask(n);
    auto weights = normal<T>(n, 1);
    optim::adamw_options const options{.beta1 = 0.9, .beta2 = 0.999, .epsilon = 1e-8, .weight_decay = 0.2};
    optim::adamw<exec::host, T> o(ex, n, options, mask);
    o.start_from(ex, std::span<T const>(weights));
    adamw_reference expected(reference::doubles(std::span<T>(weights)));
    for (index_t step = 1; step <= 10; ++step) {
      auto const gradients = normal<G>(n, static_cast<std::uint64_t>(10 + step), 3);
      optim::step_values const values{
          .step = step, .learning_rate = 0.01 / static_cast<double>(step), .gradient_scale = 0.25};
      o.step(ex, std::span<T>(weights), std::span<G const>(gradients), values);
      expected.step(reference::doubles(std::span<G const>(gradients)), mask, options, values);
    }
    auto state = o.state();
    if constexpr (!std::is_same_v<T, float>) {
      REQUIRE(state.size() == 3);
      CHECK(state[0].name == "master");
      CHECK(reference::max_relative_error(state[0].values, expected.weight) < 1e-6);
      // What is stored is the master rounded once.
      bool rounded = true;
      for (std::size_t i = 0; i < weights.size(); ++i)
        rounded = rounded && weights[i].bits == T(state[0].values[i]).bits;
      CHECK(rounded);
      state.erase(state.begin());
    } else {
      CHECK(reference::max_relative_error(std::span<T>(weights), expected.weight) < 1e-6);
    }
    REQUIRE(state.size() == 2);
    CHECK(state[0].name == "exp_avg");
    CHECK(state[1].name == "exp_avg_sq");
    CHECK(reference::max_relative_error(state[0].values, expected.first) < 1e-6);
    CHECK(reference::max_relative_error(state[1].values, expected.second) < 1e-6);
  }
}

TEST_CASE("The first step from a hand-computed state moves each weight by the rate against its gradient") {
  // After bias correction m / sqrt(v) is the gradient's sign; weight decay takes rate * decay of the weight.
  exec::host ex({.threads = 1});
  std::vector<float> weights = {1, 1, -2}, gradients = {0.5f, -3, 0};
  optim::adamw<exec::host, float> o(ex, 3, {.weight_decay = 0.5}, {{0, 1}, {2, 3}});
  o.step(ex, std::span(weights), std::span<float const>(gradients), {.step = 1, .learning_rate = 0.1});
  CHECK(weights[0] == doctest::Approx(1 - 0.1 * 0.5 * 1 - 0.1));
  CHECK(weights[1] == doctest::Approx(1 + 0.1));
  CHECK(weights[2] == doctest::Approx(-2 + 0.1 * 0.5 * 2));
}

TEST_CASE("The gradient scale is the same as scaled gradients") {
  exec::host ex({.threads = 2});
  index_t const n = 5003;
  auto plain = normal<float>(n, 1), scaled = plain;
  auto const gradients = normal<float>(n, 2);
  auto quarter = gradients;
  for (auto& g : quarter) g *= 0.25f; // exact
  optim::adamw<exec::host, float> a(ex, n, {}, {}), b(ex, n, {}, {});
  a.step(ex, std::span(plain), std::span<float const>(gradients),
         {.step = 1, .learning_rate = 1e-3, .gradient_scale = 0.25});
  b.step(ex, std::span(scaled), std::span<float const>(quarter), {.step = 1, .learning_rate = 1e-3});
  CHECK(plain == scaled);
}

TEST_CASE("Thread counts and the cut into shards do not change a bit") {
  index_t const n = 40009;
  auto const start = normal<float>(n, 1), gradients = normal<float>(n, 2);
  std::vector<layout::range> const mask = {{5, 20011}, {30000, 30001}};
  auto const run = [&](int threads, index_t shards) {
    exec::host ex({.threads = threads});
    auto weights = start;
    for (index_t s = 0; s < shards; ++s) {
      auto const part = layout::shard_of(n, shards, s);
      std::vector<layout::range> inside;
      for (auto r : mask)
        if (auto const shared = layout::intersection(r, part); !shared.empty())
          inside.push_back({shared.begin - part.begin, shared.end - part.begin});
      optim::adamw<exec::host, float> o(ex, part.size(), {}, inside);
      auto const at = static_cast<std::size_t>(part.begin), size = static_cast<std::size_t>(part.size());
      for (index_t step = 1; step <= 3; ++step)
        o.step(ex, std::span(weights).subspan(at, size), std::span<float const>(gradients).subspan(at, size),
               {.step = step, .learning_rate = 0.01});
    }
    return weights;
  };
  auto const alone = run(1, 1);
  CHECK(run(2, 1) == alone);
  CHECK(run(3, 1) == alone);
  CHECK(run(2, 7) == alone);
}

TEST_CASE("A master copy starts from better known fp32 values where they are given") {
  exec::host ex({.threads = 1});
  std::vector<float> const exact = {0.1f, 0.2f, 0.3f};
  std::vector<bf16> weights(exact.size());
  for (std::size_t i = 0; i < exact.size(); ++i) weights[i] = bf16(exact[i]);
  optim::adamw<exec::host, bf16> o(ex, 3, {}, {});
  o.start_from(ex, std::span<bf16 const>(weights));
  CHECK(o.state()[0].values[0] == static_cast<float>(weights[0]));
  o.start_from(ex, std::span<float const>(exact));
  CHECK(o.state()[0].values[0] == exact[0]);
}

TEST_CASE("A run that is stopped, saved and loaded goes on with the same bits") {
  exec::host ex({.threads = 2});
  index_t const n = 1009;
  auto const step = [&](auto& o, auto& weights, index_t number) {
    auto const gradients = normal<bf16>(n, static_cast<std::uint64_t>(number));
    o.step(ex, std::span(weights), std::span<bf16 const>(gradients), {.step = number, .learning_rate = 0.01});
  };
  auto weights = normal<bf16>(n, 50);
  optim::adamw<exec::host, bf16> o(ex, n, {}, {{0, 500}});
  o.start_from(ex, std::span<bf16 const>(weights));
  for (index_t s = 1; s <= 3; ++s) step(o, weights, s);

  auto resumed_weights = weights;
  optim::adamw<exec::host, bf16> resumed(ex, n, {}, {{0, 500}});
  auto const from = o.state(), to = resumed.state();
  for (std::size_t a = 0; a < from.size(); ++a)
    std::copy(from[a].values.begin(), from[a].values.end(), to[a].values.begin());
  for (index_t s = 4; s <= 6; ++s) {
    step(o, weights, s);
    step(resumed, resumed_weights, s);
  }
  bool same = true;
  for (std::size_t i = 0; i < weights.size(); ++i) same = same && weights[i].bits == resumed_weights[i].bits;
  CHECK(same);
}

TEST_CASE("Gradients of zero, subnormal and huge size give finite weights") {
  exec::host ex({.threads = 1});
  std::vector<float> weights(6, 1.0f), gradients = {0, 1e-42f, -1e-30f, 1e-20f, 1e15f, -1e18f};
  optim::adamw<exec::host, float> o(ex, 6, {}, {});
  for (index_t step = 1; step <= 3; ++step)
    o.step(ex, std::span(weights), std::span<float const>(gradients), {.step = step, .learning_rate = 0.1});
  CHECK(weights[0] == 1.0f);
  for (auto w : weights) CHECK(std::isfinite(w));
  CHECK(weights[4] == doctest::Approx(0.7));
}

TEST_CASE("A NaN gradient reaches its own weight and no other") {
  exec::host ex({.threads = 1});
  std::vector<float> weights(9, 1.0f), gradients(9, 0.5f);
  gradients[4] = NAN;
  optim::adamw<exec::host, float> o(ex, 9, {}, {});
  o.step(ex, std::span(weights), std::span<float const>(gradients), {.step = 1, .learning_rate = 0.1});
  for (std::size_t i = 0; i < 9; ++i) CHECK(std::isnan(weights[i]) == (i == 4));
}

TEST_CASE(
    "The state is counted as optimizer state: 8 bytes an element, 12 with a master, and no step adds to it") {
  exec::host ex({.threads = 1});
  memory_meter meter;
  memory_account const account{&meter, memory_kind::optimizer_state};
  optim::adamw<exec::host, float> a(ex, 1000, {}, {}, account);
  CHECK(meter.current(memory_kind::optimizer_state) == 1000 * a.state_bytes({}));
  CHECK(a.state_bytes({}) == 8);
  optim::adamw<exec::host, bf16> b(ex, 1000, {}, {}, account);
  CHECK(meter.current(memory_kind::optimizer_state) == 1000 * (8 + 12));
  auto const allocations = meter.allocations();
  std::vector<bf16> weights(1000), gradients(1000);
  b.step(ex, std::span(weights), std::span<bf16 const>(gradients), {.step = 1, .learning_rate = 0.1});
  CHECK(meter.allocations() == allocations);
}

TEST_CASE("Impossible updates are refused by name") {
  exec::host ex({.threads = 1});
  std::vector<float> weights(8), gradients(8);
  std::vector<float> const few(7);
  optim::adamw<exec::host, float> o(ex, 8, {}, {});
  auto const step = [&](std::span<float const> g, index_t number) {
    return [&ex, &o, &weights, g, number] { o.step(ex, std::span(weights), g, {.step = number}); };
  };
  CHECK(id_thrown_by<size_error>(step(few, 1)) == "E-optim-001");
  CHECK(id_thrown_by<config_error>(step(gradients, 0)) == "E-optim-004");
  for (auto const& wrong :
       {optim::adamw_options{.beta1 = 1}, {.beta2 = 1}, {.beta1 = -0.1}, {.beta2 = std::nan("")}}) {
    optim::adamw<exec::host, float> divided(ex, 8, wrong, {});
    CHECK(id_thrown_by<config_error>([&] {
            divided.step(ex, std::span(weights), std::span<float const>(gradients), {});
          }) == "E-optim-007");
  }
  optim::adamw<exec::host, float> outside(ex, 8, {}, {{4, 9}});
  CHECK(id_thrown_by<size_error>([&] {
          outside.step(ex, std::span(weights), std::span<float const>(gradients), {});
        }) == "E-optim-002");
  optim::adamw<exec::host, bf16> mixed(ex, 8, {}, {});
  CHECK(id_thrown_by<size_error>([&] { mixed.start_from(ex, std::span<float const>(few)); }) ==
        "E-optim-003");
}
