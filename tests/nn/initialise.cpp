#include <doctest/doctest.h>

#include <tessera/nn/initialise.hpp>
#include <tessera/nn/make_transformer.hpp>

#include "fixture.hpp"

using namespace tessera;

TEST_CASE("gains are one, biases and gaps zero, matrices normal, residual projections narrower") {
  auto config = nn::tiny_gpt2();
  exec::host ex({.threads = 1});
  auto const units = nn::make_transformer<exec::host, float, float>(config);
  nn::parameter_store<exec::host, float, float> store(units);
  for (auto& w : store.weights()) w = 77; // must all be overwritten
  nn::initialise(ex, store, 5);
  index_t reached = 0;
  store.for_each([&](layout::parameter const& p, layout::range where) {
    for (; reached < where.begin; ++reached) CHECK(store.weights()[static_cast<std::size_t>(reached)] == 0);
    double sum = 0, square = 0;
    for (; reached < where.end; ++reached) {
      double const w = store.weights()[static_cast<std::size_t>(reached)];
      sum += w;
      square += w * w;
    }
    auto const n = static_cast<double>(p.size);
    auto const deviation = std::sqrt(square / n - sum / n * (sum / n));
    INFO(p.name);
    if (p.shape.size() == 1) {
      CHECK(sum == (p.kind == layout::parameter_kind::norm_gain ? n : 0));
      CHECK(square == sum);
    } else {
      auto const residual = p.name.find("c_proj") != std::string::npos;
      auto const expected = residual ? 0.02 / std::sqrt(8.0) : 0.02;
      CHECK(std::abs(sum / n) < 5 * expected / std::sqrt(n));
      CHECK(deviation == doctest::Approx(expected).epsilon(5 / std::sqrt(2 * n)));
    }
  });
}

TEST_CASE("any stretch of a block starts with the same bits as the whole, by name and index alone") {
  auto const units = nn::make_transformer<exec::host, float, float>(fixture::odd_llama());
  exec::host ex({.threads = 1});
  auto const& map = units[1]->parameters();
  std::vector<bf16> whole(static_cast<std::size_t>(map.block_size()));
  nn::initialise(ex, map, {0, map.block_size()}, std::span(whole), 9);
  for (int ranks : {1, 2, 3, 7})
    for (int rank = 0; rank < ranks; ++rank) {
      auto const part = layout::ownership{rank, ranks}.of(map.block_size());
      std::vector<bf16> shard(static_cast<std::size_t>(part.size()));
      nn::initialise(ex, map, part, std::span(shard), 9);
      for (std::size_t i = 0; i < shard.size(); ++i)
        REQUIRE(shard[i].bits == whole[static_cast<std::size_t>(part.begin) + i].bits);
    }

  std::vector<bf16> other(whole.size());
  nn::initialise(ex, map, {0, map.block_size()}, std::span(other), 10);
  CHECK(fixture::distance(whole, other) > 0.1);
}

TEST_CASE("a stretch of another size than its memory is refused") {
  auto const units = nn::make_transformer<exec::host, float, float>(fixture::odd_llama());
  exec::host ex({.threads = 1});
  std::vector<float> memory(5);
  try {
    nn::initialise(ex, units[1]->parameters(), {0, 6}, std::span(memory), 9);
    FAIL("accepted");
  } catch (size_error const& e) {
    CHECK(std::string(e.id()) == "E-nn-016");
  }
}
