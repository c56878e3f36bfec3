#include <doctest/doctest.h>

#include <tessera/exec/host.hpp>
#include <tessera/nn/make_transformer.hpp>

#include "fixture.hpp"

using namespace tessera;

namespace {

using ex_t = exec::host;
using unit_t = nn::unit<ex_t, float, float>;

/// The head of a model with random weights over 2 samples of 5 tokens.
struct setting {
  nn::transformer_config config;
  ex_t ex{{.threads = 1}};
  nn::unit_list<ex_t, float, float> units = nn::make_transformer<ex_t, float, float>(config);
  unit_t& head = *units.back();
  std::vector<float> table = fixture::numbers(units.front()->parameters().block_size(), 1);
  std::vector<float> weights = fixture::numbers(head.parameters().block_size(), 2);
  std::vector<float> table_gradient = std::vector<float>(table.size()),
                     gradients = std::vector<float>(weights.size());
  std::vector<float> in = fixture::numbers(10 * config.width, 3), d_in = std::vector<float>(in.size());
  fixture::batch batch{2, 5, config.vocabulary_size};
  arena<> memory{1 << 18};

  unit_t::blocks lent() { return {weights, gradients, table, table_gradient}; }
  nn::stream<ex_t, float> begin() {
    return {.tokens = batch.token_view(),
            .targets = batch.target_view(),
            .hidden = {in.data(), {10, config.width}},
            .gradient = {d_in.data(), {10, config.width}}};
  }
  nn::loss_sum loss(nn::pass p = {.training = false}) {
    arena_scope const scope(memory);
    auto s = begin();
    head.forward(ex, lent(), s, memory, p);
    return s.loss;
  }
  void train(nn::pass p = {}) {
    arena_scope const scope(memory);
    auto s = begin();
    head.forward(ex, lent(), s, memory, p);
    CHECK(memory.used() == head.kept_bytes({2, 5}));
    head.backward(ex, lent(), s, memory, p);
    CHECK(memory.peak() <= head.kept_bytes({2, 5}) + head.scratch_bytes({2, 5}));
  }
};

std::vector<nn::transformer_config> heads() {
  auto tied_llama = fixture::odd_llama();
  tied_llama.tied_head = true;
  return {fixture::odd_gpt2(), fixture::odd_llama(), tied_llama};
}

} // namespace

TEST_CASE("the head's gradients are the slopes of its loss") {
  for (auto const& config : heads()) {
    setting t{config};
    CHECK(t.head.tied_to() == (config.tied_head ? "embedding" : ""));
    t.train();
    auto const loss = [&] { return t.loss().sum; };
    for (std::size_t i = 0; i < t.in.size(); i += 9)
      CHECK(t.d_in[i] == doctest::Approx(fixture::slope(loss, t.in[i])).epsilon(2e-3));
    for (auto const& p : t.head.parameters())
      for (index_t i = p.offset; i < p.where().end; i += p.size / 3 + 1) {
        auto const at = static_cast<std::size_t>(i);
        CHECK(t.gradients[at] == doctest::Approx(fixture::slope(loss, t.weights[at])).epsilon(2e-3));
      }
    if (config.tied_head)
      for (std::size_t at : {0u, 40u, 333u})
        CHECK(t.table_gradient[at] == doctest::Approx(fixture::slope(loss, t.table[at])).epsilon(2e-3));
  }
}

TEST_CASE("ignored targets are not counted, and all of them ignored is a loss of nothing") {
  for (auto const& config : heads()) {
    setting t{config};
    index_t predicted = 0;
    for (auto target : t.batch.targets) predicted += target != ops::ignore_index;
    CHECK(t.loss().count == static_cast<double>(predicted));
    for (auto& target : t.batch.targets) target = ops::ignore_index;
    CHECK(t.loss().count == 0);
    CHECK(t.loss().sum == 0);
    t.train();
    for (auto g : t.d_in) CHECK(g == 0);
    for (auto g : t.gradients) CHECK(g == 0);
  }
}

TEST_CASE("the gradient scale multiplies every gradient and no loss") {
  for (auto const& config : heads()) {
    setting t{config};
    t.train();
    auto const d_in = t.d_in, gradients = t.gradients, table_gradient = t.table_gradient;
    t.train({.gradient_scale = 1024});
    CHECK(t.loss({.gradient_scale = 1024}).sum == t.loss({}).sum);
    for (std::size_t i = 0; i < d_in.size(); ++i) CHECK(t.d_in[i] == doctest::Approx(1024 * d_in[i]));
    for (std::size_t i = 0; i < gradients.size(); ++i)
      CHECK(t.gradients[i] == doctest::Approx(1024 * gradients[i]));
    for (std::size_t i = 0; i < table_gradient.size(); i += 5)
      CHECK(t.table_gradient[i] == doctest::Approx(1024 * table_gradient[i]));
  }
}

TEST_CASE("gradients add up where asked, and are overwritten otherwise") {
  for (auto const& config : heads()) {
    setting t{config};
    t.train();
    auto const once = t.gradients, table_once = t.table_gradient;
    t.train();
    CHECK(t.gradients == once);
    t.train({.accumulate = true});
    for (std::size_t i = 0; i < once.size(); ++i) CHECK(t.gradients[i] == doctest::Approx(2 * once[i]));
    for (std::size_t i = 0; i < table_once.size(); i += 5)
      CHECK(t.table_gradient[i] == doctest::Approx(2 * table_once[i]));
  }
}

TEST_CASE("smoothing and z-loss belong to the training loss alone") {
  auto config = fixture::odd_gpt2();
  setting plain{config};
  config.label_smoothing = 0.1f;
  config.z_loss = 1e-2f;
  setting smoothed{config};
  CHECK(smoothed.loss().sum == plain.loss().sum);
  CHECK(smoothed.loss({}).sum != doctest::Approx(plain.loss({}).sum).epsilon(1e-3));
}

TEST_CASE("for a decoder it leaves the logits of each sample's last token") {
  for (auto const& config : heads()) {
    setting t{config};
    auto s = t.begin();
    auto const vocabulary = config.vocabulary_size;
    std::vector<float> logits(static_cast<std::size_t>(2 * vocabulary));
    s.logits = {logits.data(), {2, vocabulary}};
    t.head.forward(t.ex, t.lent(), s, t.memory, {.training = false});
    CHECK(t.memory.used() == 0);
    CHECK(s.loss.count == 0);
    // -log softmax of these logits is the loss of a batch that predicts the last tokens alone.
    for (auto& target : t.batch.targets) target = ops::ignore_index;
    t.batch.targets[4] = 11;
    t.batch.targets[9] = 0;
    double expected = 0;
    for (std::size_t b = 0; b < 2; ++b) {
      double sum = 0;
      for (index_t v = 0; v < vocabulary; ++v)
        sum +=
            std::exp(double{logits[b * static_cast<std::size_t>(vocabulary) + static_cast<std::size_t>(v)]});
      expected += std::log(sum) - logits[b * static_cast<std::size_t>(vocabulary) + (b == 0 ? 11 : 0)];
    }
    CHECK(t.loss().sum == doctest::Approx(expected).epsilon(1e-5));
  }
}

TEST_CASE("a target outside the vocabulary, or a missing gradient block, is refused") {
  setting t{fixture::odd_gpt2()};
  t.batch.targets[2] = 37;
  CHECK_THROWS_AS(t.loss(), size_error);
  t.batch.targets[2] = 0;
  auto s = t.begin();
  auto lent = t.lent();
  lent.gradients = {};
  CHECK_THROWS_AS(t.head.forward(t.ex, lent, s, t.memory, {}), size_error);
  CHECK_NOTHROW(t.head.forward(t.ex, lent, s, t.memory, {.training = false}));
}
