#include <doctest/doctest.h>

#include <tessera/exec/host.hpp>
#include <tessera/nn/transformer_block.hpp>

#include "fixture.hpp"

using namespace tessera;

namespace {

using ex_t = exec::host;

/// One block with random weights over 3 samples of 5 tokens.
template <class Block, class T = float>
struct setting {
  nn::transformer_config config;
  Block block{config, 1};
  nn::batch_shape shape{3, 5};
  ex_t ex{{.threads = 1}};
  std::vector<float> weights = fixture::numbers(block.parameters().block_size(), 1);
  std::vector<float> gradients = std::vector<float>(weights.size());
  std::vector<float> in = fixture::numbers(shape.tokens() * config.width, 2);
  std::vector<std::int32_t> tokens = std::vector<std::int32_t>(static_cast<std::size_t>(shape.tokens()));
  arena<> memory{1 << 18};

  typename Block::blocks lent() { return {weights, gradients, {}, {}}; }
  nn::stream<ex_t, float> stream_of(std::vector<float>& hidden) {
    return {.tokens = {tokens.data(), {shape.batch, shape.sequence_length}},
            .hidden = {hidden.data(), {shape.tokens(), config.width}}};
  }
  /// The output; the input is kept as it was.
  std::vector<float> forward(nn::pass p) {
    arena_scope const scope(memory);
    auto hidden = in;
    auto s = stream_of(hidden);
    block.forward(ex, lent(), s, memory, p);
    if (p.training) CHECK(hidden == in);
    auto const out = s.hidden.span();
    return {out.begin(), out.end()};
  }
};

template <class Block>
void check_block(nn::transformer_config config) {
  for (float const dropout : {0.0f, 0.3f}) {
    config.dropout = dropout;
    setting<Block> t{config};
    nn::pass const p{.seed = 3, .step = 4, .first_sample = 2};
    auto d_out = fixture::numbers(static_cast<index_t>(t.in.size()), 3);
    auto const loss = [&] { return fixture::inner(t.forward(p), d_out); };

    auto hidden = t.in, gradient = d_out;
    auto s = t.stream_of(hidden);
    t.block.forward(t.ex, t.lent(), s, t.memory, p);
    CHECK(t.memory.used() == t.block.kept_bytes(t.shape));
    s.gradient = {gradient.data(), {t.shape.tokens(), config.width}};
    t.block.backward(t.ex, t.lent(), s, t.memory, p);
    CHECK(t.memory.used() == t.block.kept_bytes(t.shape));
    CHECK(t.memory.peak() == t.block.kept_bytes(t.shape) + t.block.scratch_bytes(t.shape));

    for (std::size_t i = 0; i < gradient.size(); i += 17)
      CHECK(gradient[i] == doctest::Approx(fixture::slope(loss, t.in[i], 0.01f)).epsilon(5e-3));
    for (auto const& parameter : t.block.parameters())
      for (auto i = parameter.offset; i < parameter.where().end; i += parameter.size / 3 + 1) {
        auto const at = static_cast<std::size_t>(i);
        INFO(parameter.name << " element " << at - static_cast<std::size_t>(parameter.offset));
        CHECK(t.gradients[at] + 1 ==
              doctest::Approx(fixture::slope(loss, t.weights[at], 0.01f) + 1).epsilon(5e-3));
      }
  }
}

} // namespace

TEST_CASE("a GPT-2 block's backward is the slope of its forward, dropout included") {
  check_block<nn::gpt2_block<ex_t, float, float>>(fixture::odd_gpt2());
}

TEST_CASE("a Llama block's backward is the slope of its forward, dropout included") {
  check_block<nn::llama_block<ex_t, float, float>>(fixture::odd_llama());
}

TEST_CASE("evaluation gives training's numbers without dropout, and gives all memory back") {
  auto config = fixture::odd_llama();
  setting<nn::llama_block<ex_t, float, float>> t{config};
  auto const expected = t.forward({});
  CHECK(t.forward({.training = false}) == expected);
  CHECK(t.memory.used() == 0);
  config.dropout = 0.5f;
  setting<nn::llama_block<ex_t, float, float>> dropped{config};
  CHECK(dropped.forward({.training = false}) == expected);
  CHECK(dropped.forward({}) != expected);
}

TEST_CASE("dropout's mask follows seed, step and global sample, not the cut into micro-batches") {
  auto config = fixture::odd_gpt2();
  config.dropout = 0.4f;
  using block_t = nn::gpt2_block<ex_t, float, float>;
  setting<block_t> t{config};
  auto const whole = t.forward({.seed = 1, .step = 2, .first_sample = 10});
  CHECK(t.forward({.seed = 1, .step = 2, .first_sample = 10}) == whole);
  CHECK(t.forward({.seed = 2, .step = 2, .first_sample = 10}) != whole);
  CHECK(t.forward({.seed = 1, .step = 3, .first_sample = 10}) != whole);
  CHECK(t.forward({.seed = 1, .step = 2, .first_sample = 11}) != whole);

  auto const sample = static_cast<std::size_t>(5 * config.width);
  for (std::size_t b = 0; b < 3; ++b) {
    setting<block_t> part{config};
    part.shape = {1, 5};
    part.in = {t.in.begin() + static_cast<std::ptrdiff_t>(b * sample),
               t.in.begin() + static_cast<std::ptrdiff_t>((b + 1) * sample)};
    auto const out = part.forward({.seed = 1, .step = 2, .first_sample = 10 + static_cast<index_t>(b)});
    CHECK(fixture::distance(out, std::span(whole).subspan(b * sample, sample)) < 1e-6);
  }
}

TEST_CASE("micro-batches in flight keep their pieces apart") {
  setting<nn::gpt2_block<ex_t, float, float>> t{fixture::odd_gpt2()};
  t.block.reserve(2);
  auto first = t.in, second = fixture::numbers(static_cast<index_t>(t.in.size()), 9);
  auto const d_out = fixture::numbers(static_cast<index_t>(t.in.size()), 3);
  auto const gradient_of = [&](std::vector<float> hidden) {
    arena_scope const scope(t.memory);
    auto s = t.stream_of(hidden);
    auto gradient = d_out;
    s.gradient = {gradient.data(), {15, 15}};
    t.block.forward(t.ex, t.lent(), s, t.memory, {});
    t.block.backward(t.ex, t.lent(), s, t.memory, {});
    return gradient;
  };
  auto const expected_first = gradient_of(first), expected_second = gradient_of(second);

  auto a = t.stream_of(first), b = t.stream_of(second);
  t.block.forward(t.ex, t.lent(), a, t.memory, {.slot = 0});
  t.block.forward(t.ex, t.lent(), b, t.memory, {.slot = 1});
  auto d_first = d_out, d_second = d_out;
  a.gradient = {d_first.data(), {15, 15}};
  b.gradient = {d_second.data(), {15, 15}};
  t.block.backward(t.ex, t.lent(), a, t.memory, {.slot = 0});
  t.block.backward(t.ex, t.lent(), b, t.memory, {.accumulate = true, .slot = 1});
  CHECK(d_first == expected_first);
  CHECK(d_second == expected_second);
}

TEST_CASE("a slot that was not reserved, and blocks of another size, are refused") {
  setting<nn::gpt2_block<ex_t, float, float>> t{fixture::odd_gpt2()};
  auto hidden = t.in;
  auto s = t.stream_of(hidden);
  CHECK_THROWS_AS(t.block.forward(t.ex, t.lent(), s, t.memory, {.slot = 1}), config_error);
  CHECK_THROWS_AS(t.block.forward(t.ex, t.lent(), s, t.memory, {.slot = -1}), config_error);
  CHECK_THROWS_AS(t.block.reserve(0), config_error);
  auto lent = t.lent();
  lent.weights = lent.weights.first(lent.weights.size() - 1);
  CHECK_THROWS_AS(t.block.forward(t.ex, lent, s, t.memory, {}), size_error);
  lent = t.lent();
  lent.gradients = {};
  CHECK_NOTHROW(t.block.forward(t.ex, lent, s, t.memory, {}));
  CHECK_THROWS_AS(t.block.backward(t.ex, lent, s, t.memory, {}), size_error);
}
