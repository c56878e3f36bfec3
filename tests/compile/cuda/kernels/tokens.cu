// What reads tokens: the embedding and the loss, for every storage type of activations and of gradients.
#include <tessera/ops/cuda/cross_entropy.cuh>
#include <tessera/ops/cuda/embedding.cuh>
#include <tessera/ops/cuda/sliced_cross_entropy.cuh>

using namespace tessera;
template <class T, int Rank>
using on_device = view<T, Rank, exec::cuda_memory>;

template <storage_scalar T, storage_scalar G>
void tokens(exec::cuda& ex, on_device<T, 2> x, on_device<G, 2> gradient, on_device<std::int32_t, 2> tokens) {
  ops::embedding(ex, x, tokens, x, x);
  ops::embedding(ex, on_device<float, 2>{}, tokens, x, x);
  ops::embedding_backward(ex, gradient, gradient, x, tokens);
  (void)ops::cross_entropy(ex, x, {}, on_device<std::int32_t, 1>{});
  ops::softmax_statistics(ex, {}, x, on_device<std::int32_t, 1>{});
  ops::merge_softmax_statistics(ex, on_device<float, 2>{}, on_device<float, 3>{});
  (void)ops::cross_entropy_of(ex, x, {}, on_device<std::int32_t, 1>{}, on_device<float, 2>{});
}
template void tokens<float, float>(exec::cuda&, on_device<float, 2>, on_device<float, 2>,
                                   on_device<std::int32_t, 2>);
template void tokens<bf16, bf16>(exec::cuda&, on_device<bf16, 2>, on_device<bf16, 2>,
                                 on_device<std::int32_t, 2>);
template void tokens<bf16, float>(exec::cuda&, on_device<bf16, 2>, on_device<float, 2>,
                                  on_device<std::int32_t, 2>);
template void tokens<fp16, fp16>(exec::cuda&, on_device<fp16, 2>, on_device<fp16, 2>,
                                 on_device<std::int32_t, 2>);
template void tokens<fp16, float>(exec::cuda&, on_device<fp16, 2>, on_device<float, 2>,
                                  on_device<std::int32_t, 2>);
