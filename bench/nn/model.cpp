// requires: onednn
// smoke: none
// One training step of GPT-2 124M (forward, loss, backward, AdamW over all parameters) beside the sum of its
// bare matrix products: those of the linear layers and of the head, three of each. Attention's own products
// are not among them, so they count as Tessera's overhead.
#include <tessera/nn/model.hpp>
#include <tessera/optim/adamw.hpp>

#include "support/bare_products.hpp"

namespace {

using namespace tessera;

std::vector<bench::product_shape> products_of(nn::transformer_config const& c, index_t tokens) {
  std::vector<bench::product_shape> list;
  auto const linear = [&](index_t out, index_t in) {
    list.push_back({tokens, out, in, false, true});  // y = x w^T
    list.push_back({tokens, in, out, false, false}); // dx = dy w
    list.push_back({out, in, tokens, true, false});  // dw = dy^T x
  };
  for (index_t layer = 0; layer < c.layers; ++layer) {
    linear(3 * c.width, c.width);
    linear(c.width, c.width);
    linear(4 * c.width, c.width);
    linear(c.width, 4 * c.width);
  }
  linear(c.vocabulary_size, c.width);
  return list;
}

template <class T>
void gpt2_step(benchmark::State& state) {
  auto const batch = index_t{state.range(0)}, length = index_t{state.range(1)};
  auto const config = nn::gpt2_124m();
  exec::host ex;
  nn::model<exec::host, T, float> model(config, {batch, length});
  auto& store = model.store();
  nn::initialise(ex, store, 1);
  optim::adamw<exec::host, T> optimizer(ex, store.size(), {}, {{0, store.size()}});
  optimizer.start_from(ex, std::span<T const>(store.weights()));

  tensor<std::int32_t, 2> tokens({batch, length}), targets({batch, length});
  philox const random(7);
  for (index_t i = 0; i < tokens.size(); ++i) {
    tokens.data()[i] = narrow<std::int32_t>(random.bits(static_cast<std::uint64_t>(i)) % 50257);
    targets.data()[i] = narrow<std::int32_t>(random.bits(static_cast<std::uint64_t>(i + 4096)) % 50257);
  }
  bench::bare_products<T> bare(products_of(config, batch * length));
  index_t step = 0;
  bench::against_peer(
      state, bare.name(),
      [&] {
        auto const loss = model.forward_backward(ex, tokens.view(), targets.view(),
                                                 {.step = static_cast<std::uint64_t>(step)});
        optimizer.step(ex, store.weights(), std::span<float const>(store.gradients()),
                       {.step = ++step, .learning_rate = 1e-4, .gradient_scale = 1.0 / loss.count});
      },
      bare);
}

BENCHMARK(gpt2_step<float>)
    ->Name("nn/model/gpt2_124m_step_fp32")
    ->Args({4, 64})
    ->Args({2, 512})
    ->UseManualTime();
BENCHMARK(gpt2_step<bf16>)
    ->Name("nn/model/gpt2_124m_step_bf16")
    ->Args({4, 64})
    ->Args({2, 512})
    ->UseManualTime();

} // namespace

BENCHMARK_MAIN();
