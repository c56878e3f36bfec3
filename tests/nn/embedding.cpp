#include <doctest/doctest.h>

#include <tessera/exec/host.hpp>
#include <tessera/nn/embedding.hpp>

#include "fixture.hpp"

using namespace tessera;

namespace {

using ex_t = exec::host;
using embedding_t = nn::embedding<ex_t, float, float>;

struct setting {
  ex_t ex{{.threads = 1}};
  embedding_t unit;
  std::vector<float> weights, gradients;
  arena<> memory{1 << 16};
  fixture::batch batch{2, 5, 37};
  nn::stream<ex_t, float> s{.tokens = batch.token_view()};

  explicit setting(nn::transformer_config const& config)
      : unit(config), weights(fixture::numbers(unit.parameters().block_size(), 1)),
        gradients(weights.size(), 100.0f) {}
  embedding_t::blocks lent() { return {weights, gradients, {}, {}}; }
};

} // namespace

TEST_CASE("a token's row is the table's plus the position's") {
  auto const config = fixture::odd_gpt2();
  setting t(config);
  t.unit.forward(t.ex, t.lent(), t.s, t.memory, {});
  CHECK(t.memory.used() == t.unit.kept_bytes({2, 5}));
  auto const positions = static_cast<std::size_t>(t.unit.parameters()[1].offset);
  for (std::size_t row = 0; row < 10; ++row)
    for (std::size_t c = 0; c < 15; ++c)
      CHECK(t.s.hidden(row, c) == t.weights[static_cast<std::size_t>(t.batch.tokens[row]) * 15 + c] +
                                      t.weights[positions + row % 5 * 15 + c]);
}

TEST_CASE("its gradient overwrites, or adds where asked; a tied table always adds to what the head wrote") {
  for (bool const tied : {true, false})
    for (bool const accumulate : {true, false}) {
      auto config = fixture::odd_gpt2();
      config.tied_head = tied;
      setting t(config);
      auto gradient = fixture::numbers(10 * 15, 2);
      t.unit.forward(t.ex, t.lent(), t.s, t.memory, {.accumulate = accumulate});
      t.s.gradient = {gradient.data(), {10, 15}};
      t.unit.backward(t.ex, t.lent(), t.s, t.memory, {.accumulate = accumulate});
      auto const& map = t.unit.parameters();
      std::vector<double> expected(t.gradients.size());
      for (index_t i = 0; i < map.block_size(); ++i) {
        auto const in_table = i < map[0].where().end && i >= map[0].where().begin;
        auto const in_positions = i < map[1].where().end && i >= map[1].where().begin;
        auto const keeps = in_table ? accumulate || tied : in_positions ? accumulate : true;
        expected[static_cast<std::size_t>(i)] = keeps ? 100 : 0;
      }
      for (std::size_t row = 0; row < 10; ++row)
        for (std::size_t c = 0; c < 15; ++c) {
          expected[static_cast<std::size_t>(t.batch.tokens[row]) * 15 + c] += gradient[row * 15 + c];
          expected[static_cast<std::size_t>(map[1].offset) + row % 5 * 15 + c] += gradient[row * 15 + c];
        }
      CHECK(fixture::distance(t.gradients, expected) < 1e-6);
    }
}

TEST_CASE("what cannot be looked up is refused") {
  auto const id_of = [](nn::transformer_config const& config, auto&& spoil) {
    setting t(config);
    auto lent = t.lent();
    spoil(t, lent);
    try {
      t.unit.forward(t.ex, lent, t.s, t.memory, {});
    } catch (size_error const& e) {
      return std::string(e.id());
    }
    return std::string("accepted");
  };
  CHECK(id_of(fixture::odd_gpt2(), [](auto&, auto&) {}) == "accepted");
  for (auto const& config : {fixture::odd_gpt2(), fixture::odd_llama()}) {
    CHECK(id_of(config, [](auto& t, auto&) { t.batch.tokens[3] = 41; }) == "E-ops-011");
    CHECK(id_of(config, [](auto& t, auto&) { t.batch.tokens[3] = -1; }) == "E-ops-011");
    CHECK(id_of(config, [](auto& t, auto&) { t.s.first_position = 7; }) == "E-nn-013");
    CHECK(id_of(config, [](auto&, auto& lent) { lent.weights = lent.weights.first(3); }) == "E-nn-010");
  }
}
