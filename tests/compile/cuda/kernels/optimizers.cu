// Fused updates, for every storage type of weights and of gradients.
#include <tessera/optim/adamw.hpp>
#include <tessera/optim/cuda/flat_update.cuh>
#include <tessera/optim/sgd.hpp>

using namespace tessera;
template <class T>
using on_device = device_span<T, exec::cuda_memory>;

template <storage_scalar T, storage_scalar G>
void optimizers(exec::cuda& ex, on_device<T> weights, on_device<G const> gradients) {
  optim::adamw<exec::cuda, T> adamw(ex, 1, {}, {});
  adamw.start_from(ex, weights);
  adamw.step(ex, weights, gradients, {});
  optim::sgd<exec::cuda, T> sgd(ex, 1, {}, {});
  sgd.step(ex, weights, gradients, {});
}
template void optimizers<float, float>(exec::cuda&, on_device<float>, on_device<float const>);
template void optimizers<bf16, bf16>(exec::cuda&, on_device<bf16>, on_device<bf16 const>);
template void optimizers<bf16, float>(exec::cuda&, on_device<bf16>, on_device<float const>);
template void optimizers<fp16, fp16>(exec::cuda&, on_device<fp16>, on_device<fp16 const>);
template void optimizers<fp16, float>(exec::cuda&, on_device<fp16>, on_device<float const>);
