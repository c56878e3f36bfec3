#include <doctest/doctest.h>

#include <tessera/exec/host.hpp>
#include <tessera/nn/feed_forward.hpp>

#include "fixture.hpp"

using namespace tessera;

namespace {

using ex_t = exec::host;

/// Runs a feed-forward part over 5 tokens and compares its backward with slopes of its forward.
template <class Layer>
void check_slopes(nn::transformer_config const& config) {
  index_t const tokens = 5, width = config.width;
  ex_t ex({.threads = 1});
  layout::parameter_map map;
  Layer const layer(map, "m", config);
  auto weights = fixture::numbers(map.block_size(), 1);
  for (auto& w : weights) w *= 0.5f;
  std::vector<float> gradients(weights.size());
  auto in = fixture::numbers(tokens * width, 2), d_out = fixture::numbers(tokens * width, 3);
  std::vector<float> out(in.size()), d_in(in.size());
  auto const matrix = [&](std::vector<float>& x) { return view<float, 2>(x.data(), {tokens, width}); };

  arena<> memory(1 << 16);
  auto const kept = layer.take(memory, tokens);
  auto const after_forward = memory.used();
  auto const loss = [&] {
    layer.forward(ex, std::span<float const>(weights), matrix(out), matrix(in), kept);
    return fixture::inner(out, d_out);
  };
  loss();
  layer.backward(ex, std::span<float const>(weights), std::span<float>(gradients), matrix(d_in),
                 matrix(d_out), matrix(in), kept, memory, false);
  CHECK(memory.used() == after_forward);
  CHECK(memory.peak() == after_forward + layer.scratch_bytes(tokens));

  for (std::size_t i = 0; i < in.size(); i += 7)
    CHECK(d_in[i] == doctest::Approx(fixture::slope(loss, in[i])).epsilon(2e-3));
  for (auto const& p : map)
    for (auto i = static_cast<std::size_t>(p.offset); i < static_cast<std::size_t>(p.where().end);
         i += static_cast<std::size_t>(p.size / 3 + 1)) {
      INFO(p.name << " element " << i);
      CHECK(gradients[i] == doctest::Approx(fixture::slope(loss, weights[i])).epsilon(2e-3));
    }

  auto const once = gradients;
  loss(); // the slopes left other pieces behind
  layer.backward(ex, std::span<float const>(weights), std::span<float>(gradients), matrix(d_in),
                 matrix(d_out), matrix(in), kept, memory, true);
  for (std::size_t i = 0; i < once.size(); ++i)
    CHECK(gradients[i] == doctest::Approx(2 * once[i]).epsilon(1e-4));
}

} // namespace

TEST_CASE("GPT-2's feed-forward part: its backward is the slope of its forward") {
  check_slopes<nn::gelu_feed_forward<ex_t, float, float>>(fixture::odd_gpt2());
}

TEST_CASE("Llama's gated feed-forward part: its backward is the slope of its forward") {
  check_slopes<nn::swiglu_feed_forward<ex_t, float, float>>(fixture::odd_llama());
}

TEST_CASE("the gated part is down(silu(gate) up)") {
  auto const config = fixture::odd_llama();
  index_t const width = config.width, inner = config.feed_forward;
  ex_t ex({.threads = 1});
  layout::parameter_map map;
  nn::swiglu_feed_forward<ex_t, float, float> const layer(map, "m", config);
  auto const weights = fixture::numbers(map.block_size(), 1);
  auto in = fixture::numbers(width, 2);
  std::vector<float> out(in.size());
  arena<> memory(1 << 16);
  layer.forward(ex, std::span<float const>(weights), view<float, 2>(out.data(), {1, width}),
                view<float const, 2>(in.data(), {1, width}), layer.take(memory, 1));
  auto const at = [&](std::size_t p, index_t i, index_t j) {
    return double{weights[static_cast<std::size_t>(map[p].offset + i * map[p].shape[1] + j)]};
  };
  std::vector<double> expected(in.size());
  for (index_t f = 0; f < inner; ++f) {
    double gate = 0, up = 0;
    for (index_t c = 0; c < width; ++c) {
      gate += at(0, f, c) * in[static_cast<std::size_t>(c)];
      up += at(1, f, c) * in[static_cast<std::size_t>(c)];
    }
    for (index_t c = 0; c < width; ++c)
      expected[static_cast<std::size_t>(c)] += at(2, c, f) * gate / (1 + std::exp(-gate)) * up;
  }
  CHECK(fixture::distance(out, expected) < 1e-5);
}

TEST_CASE("both parts model the concept") {
  CHECK(nn::feed_forward_layer<nn::gelu_feed_forward<ex_t, bf16, float>, ex_t, bf16, float>);
  CHECK(nn::feed_forward_layer<nn::swiglu_feed_forward<ex_t, fp16, float>, ex_t, fp16, float>);
  CHECK(!nn::feed_forward_layer<int, ex_t, float, float>);
}
