#include <doctest/doctest.h>

#include <tessera/nn/decoder.hpp>
#include <tessera/nn/model.hpp>

#include "fixture.hpp"

using namespace tessera;

namespace {

using ex_t = exec::host;
using decoder_t = nn::decoder<ex_t, float, float>;

nn::model<ex_t, float, float> make(ex_t& ex, nn::transformer_config const& config) {
  nn::model<ex_t, float, float> m(config, {2, 11}, {.training = false});
  nn::initialise(ex, m.store(), 1);
  return m;
}

/// The probability of `token` after tokens[0 .. length) of each sample, by the full forward.
double full_loss(ex_t& ex, nn::model<ex_t, float, float>& m, fixture::batch batch, index_t length) {
  for (index_t b = 0; b < batch.samples; ++b)
    for (index_t t = 0; t < batch.length; ++t)
      if (t != length - 1)
        batch.targets[static_cast<std::size_t>(b * batch.length + t)] = ops::ignore_index;
      else
        batch.targets[static_cast<std::size_t>(b * batch.length + t)] = 17;
  return m.evaluate(ex, batch.token_view(), batch.target_view()).sum;
}

/// The same from logits.
double loss_of(view<float const, 2> logits) {
  double loss = 0;
  for (index_t b = 0; b < logits.extent(0); ++b) {
    double sum = 0;
    for (index_t v = 0; v < logits.extent(1); ++v) sum += std::exp(double{logits(b, v)});
    loss += std::log(sum) - logits(b, 17);
  }
  return loss;
}

} // namespace

TEST_CASE("token by token, in chunks, or with a prompt, the decoder gives the full forward's logits") {
  auto tied = fixture::odd_llama();
  tied.tied_head = true;
  for (auto const& config : {fixture::odd_gpt2(), fixture::odd_llama(), tied}) {
    ex_t ex({.threads = 1});
    auto m = make(ex, config);
    fixture::batch const batch(2, 11, config.vocabulary_size);
    for (index_t const chunk : {1, 3, 128})
      for (auto const& feeds : {std::vector<index_t>{1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1}, {7, 1, 1, 2}, {11}}) {
        decoder_t decoder(m.units(), m.store(), config, {.batch = 2, .chunk = chunk});
        for (auto const count : feeds) {
          auto const tokens = batch.token_view().slice(1, decoder.length(), decoder.length() + count);
          auto const logits = decoder.feed(ex, tokens);
          CHECK(logits.extents() == extents<2>{2, config.vocabulary_size});
          CHECK(loss_of(logits) == doctest::Approx(full_loss(ex, m, batch, decoder.length())).epsilon(1e-5));
        }
        CHECK(decoder.length() == 11);
      }
  }
}

TEST_CASE("a decoder that was reset begins anew, and a step allocates nothing") {
  auto const config = fixture::odd_llama();
  ex_t ex({.threads = 1});
  auto m = make(ex, config);
  fixture::batch const batch(1, 11, config.vocabulary_size);
  memory_meter meter;
  decoder_t decoder(m.units(), m.store(), config, {.meter = &meter});
  auto const allocations = meter.allocations();
  auto const first = loss_of(decoder.feed(ex, batch.token_view().slice(1, 0, 5)));
  decoder.feed(ex, batch.token_view().slice(1, 5, 9));
  decoder.reset();
  CHECK(decoder.length() == 0);
  CHECK(loss_of(decoder.feed(ex, batch.token_view().slice(1, 0, 5))) == first);
  CHECK(meter.allocations() == allocations);
}

TEST_CASE("tokens that do not fit are refused and leave the decoder as it was") {
  auto const config = fixture::odd_gpt2();
  ex_t ex({.threads = 1});
  auto m = make(ex, config);
  fixture::batch batch(1, 11, config.vocabulary_size);
  auto const tokens = batch.token_view();
  auto const id_of = [&](auto&& f) {
    try {
      f();
    } catch (size_error const& e) {
      return std::string(e.id());
    }
    return std::string("accepted");
  };
  decoder_t decoder(m.units(), m.store(), config, {.capacity = 8, .chunk = 2});
  CHECK(decoder.capacity() == 8);
  auto const expected = loss_of(decoder.feed(ex, tokens.slice(1, 0, 6)));
  decoder.reset();
  decoder.feed(ex, tokens.slice(1, 0, 5));
  CHECK(id_of([&] { decoder.feed(ex, tokens.slice(1, 0, 4)); }) == "E-nn-023");
  CHECK(id_of([&] { decoder.feed(ex, tokens.slice(1, 0, 0)); }) == "E-nn-022");
  CHECK(id_of([&] { decoder.feed(ex, fixture::batch(2, 1, 5).token_view()); }) == "E-nn-022");
  batch.tokens[8] = 99; // in the second chunk: the first was already run
  CHECK(id_of([&] { decoder.feed(ex, tokens.slice(1, 6, 9)); }) == "E-ops-011");
  CHECK(decoder.length() == 5);
  CHECK(loss_of(decoder.feed(ex, tokens.slice(1, 5, 6))) == doctest::Approx(expected).epsilon(1e-5));

  for (auto const& options : {nn::decoder_options{.batch = 0}, nn::decoder_options{.capacity = 12},
                              nn::decoder_options{.capacity = -1}, nn::decoder_options{.chunk = 0}})
    CHECK(id_of([&] { decoder_t(m.units(), m.store(), config, options); }) == "E-nn-021");
}
