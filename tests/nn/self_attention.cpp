#include <doctest/doctest.h>

#include <tessera/core/tensor.hpp>
#include <tessera/exec/host.hpp>
#include <tessera/nn/self_attention.hpp>

#include "fixture.hpp"

using namespace tessera;

namespace {

using ex_t = exec::host;
using attention_t = nn::self_attention<ex_t, float, float>;

/// A layer with its parameters and a batch of 2 samples of 7 tokens.
struct setting {
  nn::transformer_config config;
  nn::batch_shape shape{2, 7};
  ex_t ex{{.threads = 1}};
  layout::parameter_map map;
  attention_t layer{map, "a", config};
  std::vector<float> weights = fixture::numbers(map.block_size(), 1);
  std::vector<float> in = fixture::numbers(shape.tokens() * config.width, 2);
  std::vector<std::int32_t> tokens = std::vector<std::int32_t>(static_cast<std::size_t>(shape.tokens()));
  arena<> memory{1 << 18};

  explicit setting(nn::transformer_config const& c) : config(c) {
    for (auto& w : weights) w *= 0.5f;
  }
  view<float, 2> matrix(std::vector<float>& x) {
    return {x.data(), {static_cast<index_t>(x.size()) / config.width, config.width}};
  }
  nn::stream<ex_t, float> stream_of(nn::batch_shape s) const {
    return {.tokens = {tokens.data(), {s.batch, s.sequence_length}}};
  }
  std::vector<float> forward(attention_t::pieces const& kept) {
    std::vector<float> out(in.size());
    layer.forward(ex, std::span<float const>(weights), matrix(out), matrix(in), kept, stream_of(shape),
                  memory);
    return out;
  }
};

std::vector<nn::transformer_config> families() {
  return {fixture::odd_gpt2(), fixture::odd_llama()};
}

} // namespace

TEST_CASE("attention's backward is the slope of its forward, in both families") {
  for (auto const& config : families()) {
    setting s(config);
    auto const kept = s.layer.take(s.memory, s.shape);
    auto const after_forward = s.memory.used();
    auto d_out = fixture::numbers(static_cast<index_t>(s.in.size()), 3);
    auto const loss = [&] { return fixture::inner(s.forward(kept), d_out); };
    loss();
    std::vector<float> gradients(s.weights.size()), d_in(s.in.size());
    s.layer.backward(s.ex, std::span<float const>(s.weights), std::span<float>(gradients), s.matrix(d_in),
                     s.matrix(d_out), s.matrix(s.in), kept, s.shape, s.memory, false);
    CHECK(s.memory.used() == after_forward);
    CHECK(s.memory.peak() == after_forward + s.layer.scratch_bytes(s.shape));
    for (std::size_t i = 0; i < s.in.size(); i += 13)
      CHECK(d_in[i] == doctest::Approx(fixture::slope(loss, s.in[i])).epsilon(3e-3));
    for (auto const& p : s.map)
      for (auto i = static_cast<std::size_t>(p.offset); i < static_cast<std::size_t>(p.where().end);
           i += static_cast<std::size_t>(p.size / 4 + 1)) {
        INFO(p.name << " element " << i);
        // + 1: the bias of GPT-2's keys has no slope at all
        CHECK(gradients[i] + 1 == doctest::Approx(fixture::slope(loss, s.weights[i]) + 1).epsilon(3e-3));
      }
  }
}

TEST_CASE("no token sees a later one, and samples do not see each other") {
  for (auto const& config : families()) {
    setting s(config);
    auto const kept = s.layer.take(s.memory, s.shape);
    auto const before = s.forward(kept);
    auto const width = static_cast<std::size_t>(config.width);
    s.in[4 * width + 1] += 0.5f; // token 4 of sample 0
    auto const after = s.forward(kept);
    for (std::size_t token = 0; token < 14; ++token) {
      bool same = true;
      for (std::size_t c = 0; c < width; ++c)
        same = same && before[token * width + c] == after[token * width + c];
      CHECK(same == (token < 4 || token >= 7));
    }
  }
}

TEST_CASE("fed token by token through a cache, attention gives what it gives at once") {
  for (auto const& config : families()) {
    setting s(config);
    auto const expected = s.forward(s.layer.take(s.memory, s.shape));
    index_t const capacity = 9;
    extents<3> const sizes{2, capacity, s.layer.cache_width()};
    tensor<float, 3> keys(sizes), values(sizes);
    auto const width = static_cast<std::size_t>(config.width);
    for (index_t first = 0; first < 7;) {
      auto const step = first == 0 ? index_t{4} : index_t{1}; // a prompt, then single tokens
      std::vector<float> in, out(2 * static_cast<std::size_t>(step) * width);
      for (std::size_t b = 0; b < 2; ++b) {
        auto const from =
            s.in.begin() + static_cast<std::ptrdiff_t>((b * 7 + static_cast<std::size_t>(first)) * width);
        in.insert(in.end(), from, from + static_cast<std::ptrdiff_t>(static_cast<std::size_t>(step) * width));
      }
      auto stream = s.stream_of({2, step});
      stream.first_position = first;
      stream.keys = keys;
      stream.values = values;
      s.layer.forward(s.ex, std::span<float const>(s.weights), s.matrix(out), s.matrix(in),
                      s.layer.take(s.memory, {2, step}), stream, s.memory);
      for (std::size_t b = 0; b < 2; ++b)
        for (std::size_t i = 0; i < static_cast<std::size_t>(step) * width; ++i)
          CHECK(
              out[b * static_cast<std::size_t>(step) * width + i] ==
              doctest::Approx(expected[(b * 7 + static_cast<std::size_t>(first)) * width + i]).epsilon(1e-4));
      first += step;
    }
  }
}

TEST_CASE("rotated keys depend on each other by distance, not by position") {
  setting s(fixture::odd_llama());
  extents<3> const sizes{2, 7 + 20, s.layer.cache_width()};
  tensor<float, 3> keys(sizes), values(sizes);
  std::vector<float> out(s.in.size());
  auto stream = s.stream_of(s.shape);
  stream.keys = keys;
  stream.values = values;
  for (index_t first : {index_t{20}, index_t{0}}) {
    stream.first_position = first;
    s.layer.forward(s.ex, std::span<float const>(s.weights), s.matrix(out), s.matrix(s.in),
                    s.layer.take(s.memory, s.shape), stream, s.memory);
  }
  auto const dot = [&](index_t a, index_t b) {
    double sum = 0;
    for (index_t c = 0; c < s.config.head_width(); ++c) sum += double{keys(0, a, c)} * keys(0, b, c);
    return sum;
  };
  for (index_t a = 0; a < 7; ++a)
    for (index_t b = 0; b < 7; ++b) CHECK(dot(20 + a, 20 + b) == doctest::Approx(dot(a, b)).epsilon(1e-4));
  CHECK(std::abs(keys(0, 3, 0) - keys(0, 23, 0)) > 1e-3);
}
