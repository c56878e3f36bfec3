// Norms, for every storage type of activations and of gradients, and of what is normalised.
#include <tessera/ops/cuda/layer_norm.cuh>
#include <tessera/ops/cuda/rms_norm.cuh>

using namespace tessera;
template <class T, int Rank>
using on_device = view<T, Rank, exec::cuda_memory>;

template <storage_scalar T, storage_scalar R, storage_scalar G>
void norms(exec::cuda& ex, on_device<T, 2> out, on_device<R, 2> x, on_device<T, 1> gain,
           on_device<G, 1> gradient, on_device<float, 1> rows) {
  ops::layer_norm(ex, out, rows, rows, x, gain, gain);
  ops::residual_layer_norm(ex, out, x, rows, rows, x, x, gain, gain);
  ops::layer_norm_backward(ex, x, gradient, gradient, x, x, rows, rows, gain);
  ops::rms_norm(ex, out, rows, x, gain);
  ops::residual_rms_norm(ex, out, x, rows, x, x, gain);
  ops::rms_norm_backward(ex, x, gradient, x, x, rows, gain);
}
template void norms<float, float, float>(exec::cuda&, on_device<float, 2>, on_device<float, 2>,
                                         on_device<float, 1>, on_device<float, 1>, on_device<float, 1>);
template void norms<bf16, bf16, bf16>(exec::cuda&, on_device<bf16, 2>, on_device<bf16, 2>, on_device<bf16, 1>,
                                      on_device<bf16, 1>, on_device<float, 1>);
template void norms<bf16, bf16, float>(exec::cuda&, on_device<bf16, 2>, on_device<bf16, 2>,
                                       on_device<bf16, 1>, on_device<float, 1>, on_device<float, 1>);
template void norms<fp16, fp16, fp16>(exec::cuda&, on_device<fp16, 2>, on_device<fp16, 2>, on_device<fp16, 1>,
                                      on_device<fp16, 1>, on_device<float, 1>);
template void norms<fp16, fp16, float>(exec::cuda&, on_device<fp16, 2>, on_device<fp16, 2>,
                                       on_device<fp16, 1>, on_device<float, 1>, on_device<float, 1>);
template void norms<bf16, float, bf16>(exec::cuda&, on_device<bf16, 2>, on_device<float, 2>,
                                       on_device<bf16, 1>, on_device<bf16, 1>, on_device<float, 1>);
template void norms<bf16, float, float>(exec::cuda&, on_device<bf16, 2>, on_device<float, 2>,
                                        on_device<bf16, 1>, on_device<float, 1>, on_device<float, 1>);
template void norms<fp16, float, float>(exec::cuda&, on_device<fp16, 2>, on_device<float, 2>,
                                        on_device<fp16, 1>, on_device<float, 1>, on_device<float, 1>);
