/// What the tests of layouts share: a run laid over ranks, and how far two runs are apart.
#ifndef TESSERA_TESTS_PARALLEL_LAYOUTS_FIXTURE_HPP
#define TESSERA_TESTS_PARALLEL_LAYOUTS_FIXTURE_HPP

#include <doctest/doctest.h>

#include <map>
#include <mutex>
#include <string>
#include <vector>

#include <nn/fixture.hpp>
#include <tessera/exec/host.hpp>
#include <tessera/parallel/distributed_model.hpp>

namespace fixture {

using host = exec::host;

/// Lengths and widths that no axis divides evenly; enough layers for four parts.
struct layout_case {
  nn::transformer_config config;
  index_t samples = 6, steps = 5;

  index_t length() const { return config.sequence_length; }
  batch batch_of(index_t step) const {
    return {samples, length(), config.vocabulary_size, static_cast<std::uint64_t>(100 + step)};
  }
  batch unseen() const { return batch_of(1000); }
};

inline layout_case layout_gpt2() {
  return {{.vocabulary_size = 37,
           .sequence_length = 13,
           .width = 16,
           .layers = 4,
           .heads = 4,
           .feed_forward = 29,
           .dropout = 0.1f,
           .initial_deviation = 0.2f}};
}
inline layout_case layout_llama() {
  return {{.family = nn::transformer_family::llama,
           .vocabulary_size = 41,
           .sequence_length = 13,
           .width = 16,
           .layers = 4,
           .heads = 4,
           .key_value_heads = 2,
           .feed_forward = 19,
           .tied_head = false,
           .initial_deviation = 0.2f}};
}

/// What a run leaves.
struct layout_outcome {
  std::vector<double> losses, norms;
  double evaluated = 0;
  std::map<std::string, std::vector<float>> weights;
};

// A larger epsilon than in practice: the gradient of GPT-2's key bias is zero but for rounding, and Adam
// would blow that rounding up to whole steps.
inline constexpr optim::adamw_options layout_optimizer{.epsilon = 3e-4};
inline parallel::update_options layout_update(index_t step) {
  return {.step = step + 1, .learning_rate = 0.01, .clip_norm = step == 1 ? 0.5 : 0};
}
inline nn::pass layout_pass(index_t step) {
  return {.seed = 9, .step = static_cast<std::uint64_t>(step)};
}

/// One rank of a run: its samples, its tokens of them, and what it counts of the weights.
template <comm::communicator Comm>
struct layout_run {
  layout_case of;
  host ex{{.threads = 1}};
  parallel::distributed_model<Comm, host, float, float> model;
  std::vector<std::vector<std::int32_t>> lent; ///< To the step that runs.
  layout_outcome seen;

  layout_run(Comm& world, layout_case const& of_, parallel::training_layout const& layout)
      : of(of_), model(world, ex, of.config, layout, {.batch = of.samples, .optimizer = layout_optimizer}) {
    model.initialise(ex, 5);
    lent.reserve(4 * static_cast<std::size_t>(of.samples));
  }

  /// This rank's tokens of a range of samples.
  auto supplier(batch const& all) {
    lent.clear();
    return [this, &all](layout::range samples) {
      auto const here = model.group().positions(of.length());
      auto const count = model.group().local_sequence(of.length());
      auto const mine = [&](std::vector<std::int32_t> const& from) {
        auto& to = lent.emplace_back();
        for (auto s = samples.begin; s < samples.end; ++s)
          for (index_t t = 0; t < count; ++t)
            to.push_back(from[static_cast<std::size_t>(s * of.length() + here(t))]);
        return view<std::int32_t const, 2>(to.data(), {samples.size(), count});
      };
      auto const tokens = mine(all.tokens);
      return parallel::local_samples<host>{tokens, mine(all.targets)};
    };
  }

  void step(index_t number) {
    auto const all = of.batch_of(number);
    auto const done = model.step(ex, supplier(all), layout_update(number), layout_pass(number));
    seen.losses.push_back(parallel::mean_of(done.loss));
    seen.norms.push_back(done.gradient_norm);
  }
  void evaluate() {
    auto const all = of.unseen();
    seen.evaluated = parallel::mean_of(model.evaluate(ex, of.samples, supplier(all)));
  }
  void train() {
    for (index_t s = 0; s < of.steps; ++s) step(s);
    evaluate();
  }

  /// Writes what this rank counts into whole tensors, which are zeros elsewhere.
  void add_weights(std::map<std::string, std::vector<float>>& whole) {
    auto& state = model.state();
    for (std::size_t u = 0; u < state.units(); ++u) {
      auto const at = state.weights_at(u);
      auto const w = state.weights(u);
      for (auto const& p : state.parameters(u))
        whole[p.name].resize(static_cast<std::size_t>(p.whole_size()));
      for (auto const& s : layout::segments_of(state.parameters(u), state.counted(u)))
        if (layout::counts(*s.whole, model.group().tensor_rank()))
          std::copy_n(w.begin() + (s.in_block.begin - at.begin), s.in_block.size(),
                      whole[s.whole->name].begin() + s.first_element);
    }
  }
};

/// |a - b| / |b|.
inline double layout_distance(std::vector<float> const& a, std::vector<float> const& b) {
  if (a.size() != b.size()) return 1e9;
  double difference = 0, size = 0;
  for (std::size_t i = 0; i < a.size(); ++i) {
    difference += (double{a[i]} - b[i]) * (double{a[i]} - b[i]);
    size += double{b[i]} * b[i];
  }
  return std::sqrt(difference / (size + 1e-30));
}
/// The largest of |a - b| / |b|.
inline double layout_distance(std::vector<double> const& a, std::vector<double> const& b) {
  if (a.size() != b.size()) return 1e9;
  double most = 0;
  for (std::size_t i = 0; i < a.size(); ++i) most = std::max(most, std::abs(a[i] / b[i] - 1));
  return most;
}

inline void check_same(layout_outcome const& seen, layout_outcome const& expected, double tolerance = 1e-5) {
  CHECK(layout_distance(seen.losses, expected.losses) < tolerance);
  CHECK(layout_distance(seen.norms, expected.norms) < tolerance);
  CHECK(std::abs(seen.evaluated / expected.evaluated - 1) < tolerance);
  CHECK(seen.weights.size() == expected.weights.size());
  for (auto const& [name, values] : expected.weights) {
    CAPTURE(name);
    auto const found = seen.weights.find(name);
    REQUIRE(found != seen.weights.end());
    CHECK(layout_distance(found->second, values) < tolerance);
  }
}

} // namespace fixture

#endif
