#include <doctest/doctest.h>

#include <tessera/nn/model.hpp>

#include "fixture.hpp"

using namespace tessera;

namespace {

using ex_t = exec::host;

template <class T = float, class G = float>
nn::model<ex_t, T, G> make(ex_t& ex, nn::transformer_config const& config, nn::batch_shape largest,
                           memory_meter* meter = nullptr) {
  nn::model<ex_t, T, G> m(config, largest, {.meter = meter});
  nn::initialise(ex, m.store(), 1);
  return m;
}

template <class V>
std::vector<V> copy_of(std::span<V> values) {
  return {values.begin(), values.end()};
}

std::vector<nn::transformer_config> configs() {
  auto tied = fixture::odd_llama();
  tied.tied_head = true;
  auto dropped = fixture::odd_gpt2();
  dropped.dropout = 0.25f;
  return {fixture::odd_gpt2(), fixture::odd_llama(), tied, dropped};
}

template <class F>
std::string id_of(F&& f) {
  try {
    f();
  } catch (error const& e) {
    return e.id();
  }
  return "accepted";
}

} // namespace

TEST_CASE("the whole model's gradients are the slopes of its loss, dropout included") {
  for (auto const& config : configs()) {
    ex_t ex({.threads = 1});
    fixture::batch const batch(3, 7, config.vocabulary_size);
    auto m = make(ex, config, {3, 7});
    nn::pass const p{.seed = 1, .step = 5, .first_sample = 4};
    m.forward_backward(ex, batch.token_view(), batch.target_view(), p);
    auto const gradients = copy_of(m.store().gradients());
    auto const loss = [&] { return m.forward_backward(ex, batch.token_view(), batch.target_view(), p).sum; };
    std::size_t number = 0;
    m.store().for_each([&](layout::parameter const& parameter, layout::range where) {
      auto const at =
          static_cast<std::size_t>(where.begin + static_cast<index_t>(number++ * 7) % where.size());
      INFO(name_of(config.family) << ' ' << parameter.name);
      CHECK(gradients[at] + 1 ==
            doctest::Approx(fixture::slope(loss, m.store().weights()[at], 0.01f) + 1).epsilon(5e-3));
    });
  }
}

TEST_CASE("micro-batches, however they are cut and padded, add up to the gradient of one batch") {
  for (auto const& config : configs()) {
    ex_t ex({.threads = 1});
    fixture::batch const batch(5, 7, config.vocabulary_size);
    auto m = make(ex, config, {5, 7});
    nn::pass p{.seed = 1, .step = 5, .first_sample = 4};
    auto const whole = m.forward_backward(ex, batch.token_view(), batch.target_view(), p);
    auto const expected = copy_of(m.store().gradients());
    for (auto const& cuts : {std::vector<index_t>{0, 1, 2, 3, 4, 5}, {0, 2, 5}, {0, 0, 4, 4, 5}}) {
      nn::loss_sum total;
      for (std::size_t i = 1; i < cuts.size(); ++i) {
        p.first_sample = 4 + cuts[i - 1];
        p.accumulate = i > 1;
        total += m.forward_backward(ex, batch.token_view(cuts[i - 1], cuts[i]),
                                    batch.target_view(cuts[i - 1], cuts[i]), p);
      }
      CHECK(total.count == whole.count);
      CHECK(total.sum == doctest::Approx(whole.sum).epsilon(1e-6));
      CHECK(fixture::distance(m.store().gradients(), expected) < 1e-6);
    }
  }
}

TEST_CASE("forward and backward in three steps are those in one, and add up until the loss is cleared") {
  ex_t ex({.threads = 1});
  for (auto const& config : configs()) {
    fixture::batch const batch(2, 5, config.vocabulary_size);
    auto m = make(ex, config, {2, 5});
    auto const whole = m.forward_backward(ex, batch.token_view(), batch.target_view());
    auto const expected = copy_of(m.store().gradients());
    m.clear_loss(ex);
    for (int times : {1, 2}) {
      m.start_forward_backward(ex, batch.token_view(), batch.target_view(), {}, [](std::size_t) {});
      auto const loss = m.read_loss(ex);
      CHECK(loss.sum == times * whole.sum);
      CHECK(loss.count == times * whole.count);
      CHECK(copy_of(m.store().gradients()) == expected);
    }
  }
}

TEST_CASE("gradients are ready from the last unit to the first, and final when they are") {
  ex_t ex({.threads = 1});
  for (auto const& config : configs()) {
    fixture::batch const batch(2, 5, config.vocabulary_size);
    auto m = make(ex, config, {2, 5});
    std::vector<std::vector<float>> when_ready(m.store().units());
    auto next = m.store().units();
    m.forward_backward(ex, batch.token_view(), batch.target_view(), {}, [&](std::size_t unit) {
      CHECK(unit == --next);
      when_ready[unit] = copy_of(m.store().gradients(unit));
    });
    CHECK(next == 0);
    for (std::size_t i = 0; i < m.store().units(); ++i)
      CHECK(when_ready[i] == copy_of(m.store().gradients(i)));
  }
}

TEST_CASE("activations stay within the plan, which is tight, and a step allocates nothing") {
  for (auto const& config : configs()) {
    ex_t ex({.threads = 1});
    memory_meter meter;
    fixture::batch const batch(3, 7, config.vocabulary_size);
    auto m = make<bf16, float>(ex, config, {3, 7}, &meter);
    CHECK(m.activations().capacity() == m.planned_bytes({3, 7}));
    CHECK(meter.current(memory_kind::activations) == m.planned_bytes({3, 7}));
    m.forward_backward(ex, batch.token_view(), batch.target_view());
    CHECK(m.activations().peak() <= m.planned_bytes({3, 7}));
    CHECK(m.activations().peak() == m.planned_bytes({3, 7}));
    auto const allocations = meter.allocations();
    for (std::uint64_t step = 1; step < 4; ++step) {
      m.forward_backward(ex, batch.token_view(), batch.target_view(), {.step = step});
      m.evaluate(ex, batch.token_view(), batch.target_view());
      m.forward_backward(ex, batch.token_view(0, 2), batch.target_view(0, 2), {.accumulate = true});
    }
    CHECK(meter.allocations() == allocations);
    CHECK(m.activations().used() == 0);
  }
}

TEST_CASE("a model for evaluation needs little memory, gives the same loss, and refuses to train") {
  for (auto const& config : configs()) {
    ex_t ex({.threads = 1});
    fixture::batch const batch(3, 7, config.vocabulary_size);
    auto trained = make(ex, config, {3, 7});
    memory_meter meter;
    nn::model<ex_t, float, float> m(config, {3, 7}, {.meter = &meter, .training = false});
    nn::initialise(ex, m.store(), 1);
    CHECK(meter.current(memory_kind::gradients) == 0);
    CHECK(m.activations().capacity() < trained.activations().capacity());
    auto const loss = m.evaluate(ex, batch.token_view(), batch.target_view());
    CHECK(m.activations().peak() <= m.planned_bytes({3, 7}, false));
    CHECK(loss.sum == trained.evaluate(ex, batch.token_view(), batch.target_view()).sum);
    if (config.dropout == 0)
      CHECK(loss.sum == trained.forward_backward(ex, batch.token_view(), batch.target_view()).sum);
    CHECK(id_of([&] { m.forward_backward(ex, batch.token_view(), batch.target_view()); }) == "E-nn-017");
  }
}

TEST_CASE("a first loss is near the logarithm of the vocabulary's size") {
  for (auto const& config : {nn::tiny_gpt2(), nn::tiny_llama()}) {
    ex_t ex({.threads = 1});
    fixture::batch const batch(4, 16, config.vocabulary_size);
    auto m = make<bf16, float>(ex, config, {4, 16});
    auto const loss = m.evaluate(ex, batch.token_view(), batch.target_view());
    CHECK(loss.sum / loss.count == doctest::Approx(std::log(256.0)).epsilon(0.02));
  }
}

TEST_CASE_TEMPLATE("16-bit storage gives fp32's loss and gradient to its own precision", T, bf16, fp16) {
  for (auto const& config : configs()) {
    ex_t ex({.threads = 1});
    fixture::batch const batch(3, 7, config.vocabulary_size);
    auto low = make<T, float>(ex, config, {3, 7});
    auto m = make(ex, config, {3, 7});
    for (std::size_t i = 0; i < m.store().weights().size(); ++i) // start from the very same weights
      m.store().weights()[i] = low.store().weights()[i];
    auto const precision = std::same_as<T, bf16> ? 1.0 / 128 : 1.0 / 1024;
    auto const expected = m.forward_backward(ex, batch.token_view(), batch.target_view());
    auto const loss = low.forward_backward(ex, batch.token_view(), batch.target_view());
    CHECK(loss.sum == doctest::Approx(expected.sum).epsilon(precision));
    CHECK(fixture::distance(low.store().gradients(), m.store().gradients()) < 3 * precision);
  }
}

TEST_CASE("the number of threads changes no bit") {
  for (auto const& config : configs()) {
    fixture::batch const batch(5, 11, config.vocabulary_size);
    std::vector<float> expected;
    for (int threads : {1, 2, 3}) {
#if !defined(_OPENMP)
      if (threads > 1) continue;
#endif
      ex_t ex({.threads = threads});
      auto m = make(ex, config, {5, 11});
      m.forward_backward(ex, batch.token_view(), batch.target_view());
      if (threads == 1) expected = copy_of(m.store().gradients());
      CHECK(copy_of(m.store().gradients()) == expected);
    }
  }
}

TEST_CASE("a batch without samples has no loss and no gradient") {
  for (auto const& config : configs()) {
    ex_t ex({.threads = 1});
    fixture::batch const batch(2, 5, config.vocabulary_size);
    auto m = make(ex, config, {2, 5});
    m.forward_backward(ex, batch.token_view(), batch.target_view());
    auto const before = copy_of(m.store().gradients());
    auto const loss =
        m.forward_backward(ex, batch.token_view(1, 1), batch.target_view(1, 1), {.accumulate = true});
    CHECK(loss.count == 0);
    CHECK(copy_of(m.store().gradients()) == before);
    m.forward_backward(ex, batch.token_view(1, 1), batch.target_view(1, 1));
    for (auto g : m.store().gradients()) CHECK(g == 0);
    CHECK(m.evaluate(ex, batch.token_view(1, 1), batch.target_view(1, 1)).count == 0);
  }
}

TEST_CASE("batches that do not fit are refused, and the model goes on as before") {
  auto const config = fixture::odd_gpt2();
  ex_t ex({.threads = 1});
  auto m = make(ex, config, {2, 5});
  fixture::batch batch(2, 5, config.vocabulary_size), more(3, 5, config.vocabulary_size),
      longer(1, 12, config.vocabulary_size);
  auto const loss = m.evaluate(ex, batch.token_view(), batch.target_view()).sum;
  auto const train = [&](auto const& b) { m.forward_backward(ex, b.token_view(), b.target_view()); };
  CHECK(id_of([&] { train(more); }) == "E-nn-020");
  CHECK(id_of([&] { train(longer); }) == "E-nn-018");
  CHECK(id_of([&] { m.forward_backward(ex, batch.token_view(), more.target_view()); }) == "E-nn-019");
  CHECK(id_of([&] { make(ex, config, {2, 12}); }) == "E-nn-018");
  CHECK(id_of([&] { make(ex, config, {-1, 5}); }) == "E-nn-018");
  CHECK(id_of([&] { make(ex, config, {2, 0}); }) == "E-nn-018");
  batch.tokens[9] = 37;
  CHECK(id_of([&] { train(batch); }) == "E-ops-011");
  batch.tokens[9] = 36;
  batch.targets[3] = 40;
  CHECK(id_of([&] { train(batch); }) != "accepted");
  CHECK(m.activations().used() == 0);
  fixture::batch const again(2, 5, config.vocabulary_size);
  CHECK(m.evaluate(ex, again.token_view(), again.target_view()).sum == loss);
}
