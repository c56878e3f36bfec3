#include <doctest/doctest.h>

#include "shared_model.hpp"

using namespace tessera;
using shared::axes;

namespace {

nn::transformer_config gpt2(bool tied, float dropout) {
  auto config = fixture::odd_gpt2();
  config.width = 20;
  config.heads = 4;
  config.tied_head = tied;
  config.dropout = dropout;
  config.label_smoothing = 0.1f;
  return config;
}
/// 4 heads share 2 keys and values: one of them on two ranks where there are four.
nn::transformer_config llama(bool tied, float dropout) {
  auto config = fixture::odd_llama();
  config.tied_head = tied;
  config.dropout = dropout;
  config.z_loss = 0.01f;
  return config;
}
std::vector<nn::transformer_config> models() {
  return {gpt2(true, 0.2f), gpt2(false, 0), llama(false, 0.2f), llama(true, 0)};
}

shared::outcome alone(nn::transformer_config const& config, fixture::batch const& batch,
                      shared::manner how = {}, shared::nudge const& moved = {}) {
  shared::ex_t ex({.threads = 1});
  return shared::run(ex, config, nn::one_rank(), batch, how, moved);
}

double size_of(std::vector<double> const& values) {
  double sum = 0;
  for (auto v : values) sum += v * v;
  return std::sqrt(sum);
}

/// The whole loss, and each parameter's whole gradient relative to the largest one's norm: that of GPT-2's
/// key biases is nothing but rounding.
void check_same(shared::whole_outcome const& given, shared::whole_outcome const& expected, double tolerance) {
  CHECK(given.loss.count == expected.loss.count);
  CHECK(given.loss.sum == doctest::Approx(expected.loss.sum).epsilon(tolerance));
  REQUIRE(given.gradients.size() == expected.gradients.size());
  for (auto const& [name, whole] : expected.gradients) {
    INFO(name);
    auto const& mine = given.gradients.at(name);
    CHECK(fixture::distance(mine, whole) < tolerance);
    CHECK(size_of(whole) > 0);
  }
}

std::vector<axes> tensor_axes() {
  std::vector<axes> all;
  for (int tensor : {1, 2, 4})
    for (bool sequence : {false, true})
      if (tensor > 1 || !sequence)
        all.push_back({.tensor = tensor, .options = {.sequence_parallel = sequence}});
  return all;
}

} // namespace

TEST_CASE("on 1, 2 and 4 tensor ranks, rows shared or not, loss and gradients are those of one rank") {
  for (auto const& config : models()) {
    fixture::batch const batch(3, 7, config.vocabulary_size);
    auto const expected = shared::together({alone(config, batch)});
    for (auto const& on : tensor_axes()) {
      CAPTURE(on.tensor);
      CAPTURE(on.options.sequence_parallel);
      auto const ranks = shared::run_on(on, config, batch);
      check_same(shared::together(ranks), expected, 1e-5);
      for (auto const& r : ranks) CHECK(r.peak <= r.planned);
    }
  }
}
