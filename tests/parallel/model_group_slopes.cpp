#include <doctest/doctest.h>

#include "shared_model.hpp"

using namespace tessera;
using shared::axes;

namespace {

/// The loss of all ranks with one element of one parameter moved wherever it is held.
double loss_of(axes const& on, nn::transformer_config const& config, fixture::batch const& batch,
               shared::nudge const& moved) {
  return shared::together(shared::run_on(on, config, batch, {}, moved)).loss.sum;
}

/// Of fourth order, as fixture::slope.
double slope_of(axes const& on, nn::transformer_config const& config, fixture::batch const& batch,
                std::string const& parameter, index_t element) {
  float const step = 0.02f;
  auto const at = [&](float by) { return loss_of(on, config, batch, {parameter, element, by}); };
  return (8 * (at(step) - at(-step)) - (at(2 * step) - at(-2 * step))) / (12 * double{step});
}

/// Two elements of every parameter: norm gains and biases, and the biases that every rank has a copy of,
/// included.
void check_slopes(axes const& on, nn::transformer_config config) {
  config.layers = 1;
  fixture::batch const batch(2, 7, config.vocabulary_size);
  auto const given = shared::together(shared::run_on(on, config, batch));
  for (auto const& parameter : given.gradients) { // not bound by name: clang 14 captures no bindings
    auto const& name = parameter.first;
    auto const& gradient = parameter.second;
    auto const count = static_cast<index_t>(gradient.size());
    for (auto element : {count / 3, 3 * count / 4}) {
      INFO(name << " element " << element << " on tensor " << on.tensor << ", context " << on.context);
      auto const slope = slope_of(on, config, batch, name, element);
      CHECK(gradient[static_cast<std::size_t>(element)] + 1 == doctest::Approx(slope + 1).epsilon(4e-3));
    }
  }
}

nn::transformer_config four_heads() {
  auto config = fixture::odd_gpt2();
  config.width = 20;
  config.heads = 4;
  config.dropout = 0.2f;
  return config;
}
nn::transformer_config grouped_heads() {
  auto config = fixture::odd_llama();
  config.dropout = 0.2f;
  return config;
}

} // namespace

TEST_CASE("gradients of parallel layers are the slopes of the loss of all ranks, norms and biases included") {
  for (auto const& config : {four_heads(), grouped_heads()})
    for (int tensor : {2, 4})
      for (bool sequence : {false, true})
        check_slopes({.tensor = tensor, .options = {.sequence_parallel = sequence}}, config);
}

TEST_CASE("and where ranks share sequences") {
  check_slopes({.tensor = 2, .context = 2, .options = {.sequence_parallel = true}}, four_heads());
  check_slopes({.context = 2, .options = {.form = parallel::context_form::exchange}}, grouped_heads());
}
