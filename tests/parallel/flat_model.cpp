#include <tessera/parallel/flat_model.hpp>

#include "fixture.hpp"
#include <tessera/nn/make_transformer.hpp>

using namespace tessera;
using namespace fixture;

TEST_CASE("The flat model of a store is the store's buffers, cut at its units") {
  auto config = nn::tiny_gpt2();
  config.layers = 2;
  auto const units = nn::make_transformer<exec::host, bf16, float>(config);
  nn::parameter_store<exec::host, bf16, float> store(units);
  auto const flat = parallel::flat_model_of(store);
  flat.validate();
  REQUIRE(flat.units.size() == units.size());
  CHECK(flat.weights.data() == store.weights().data());
  CHECK(flat.gradients.data() == store.gradients().data());
  for (std::size_t u = 0; u < units.size(); ++u) {
    CHECK(flat.weights_of(flat.units[u]).data() == store.weights(u).data());
    CHECK(flat.gradients_of(flat.units[u]).size() == store.gradients(u).size());
    CHECK(flat.decayed[u] == optim::decayed_ranges(store.parameters(u)));
  }
}

TEST_CASE("Pieces that do not fit together are refused") {
  std::vector<float> ten(10), nine(9);
  std::vector<std::vector<layout::range>> const two_masks(2);
  auto const refused = [&](parallel::flat_model<float, float> const& m) {
    return id_thrown_by<size_error>([&] { m.validate(); }) == "E-parallel-001";
  };
  CHECK_FALSE(refused({ten, ten, units_of({4, 6}), two_masks}));
  CHECK(refused({ten, nine, units_of({4, 6}), two_masks}));
  CHECK(refused({ten, ten, units_of({4, 5}), two_masks}));
  CHECK(refused({ten, ten, units_of({4, 7}), two_masks}));
  CHECK(refused({ten, ten, {{0, 4}, {5, 10}}, two_masks}));
  CHECK(refused({ten, ten, units_of({4, 6}), {}}));
}
