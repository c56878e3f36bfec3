// Matrix products by cuBLASLt and the kernels beside them, for every storage type of activations and
// gradients.
#include <tessera/ops/cuda/linear.cuh>
#include <tessera/ops/cuda/linear_cross_entropy.cuh>
#include <tessera/ops/cuda/linear_swiglu.cuh>
#include <tessera/ops/cuda/matmul.cuh>

using namespace tessera;
template <class T, int Rank>
using on_device = view<T, Rank, exec::cuda_memory>;

template <storage_scalar T, storage_scalar G>
void products(exec::cuda& ex, on_device<T, 2> x, on_device<T, 3> batch, on_device<T, 1> bias,
              on_device<G, 2> gradient, on_device<G, 1> bias_gradient, arena<exec::cuda_memory>& memory) {
  ops::matmul(ex, x, x, x);
  ops::matmul(ex, gradient, x, x);
  ops::matmul_batched(ex, batch, batch, batch);
  ops::linear(ex, x, x, x, bias);
  ops::linear(ex, on_device<float, 2>{}, x, x, bias);
  ops::linear_swiglu(ex, x, x, x, x);
  ops::linear_backward<exec::cuda, T, G>(ex, {x, gradient, bias_gradient}, x, x, x);
  (void)ops::linear_cross_entropy<exec::cuda, T, G>(ex, {x, gradient}, x, x, on_device<std::int32_t, 1>{}, {},
                                                    memory);
  (void)ops::linear_cross_entropy<exec::cuda, float, G>(ex, {{}, gradient}, x, x,
                                                        on_device<std::int32_t, 1>{}, {}, memory);
}
template void products<float, float>(exec::cuda&, on_device<float, 2>, on_device<float, 3>,
                                     on_device<float, 1>, on_device<float, 2>, on_device<float, 1>,
                                     arena<exec::cuda_memory>&);
template void products<bf16, bf16>(exec::cuda&, on_device<bf16, 2>, on_device<bf16, 3>, on_device<bf16, 1>,
                                   on_device<bf16, 2>, on_device<bf16, 1>, arena<exec::cuda_memory>&);
template void products<bf16, float>(exec::cuda&, on_device<bf16, 2>, on_device<bf16, 3>, on_device<bf16, 1>,
                                    on_device<float, 2>, on_device<float, 1>, arena<exec::cuda_memory>&);
template void products<fp16, fp16>(exec::cuda&, on_device<fp16, 2>, on_device<fp16, 3>, on_device<fp16, 1>,
                                   on_device<fp16, 2>, on_device<fp16, 1>, arena<exec::cuda_memory>&);
template void products<fp16, float>(exec::cuda&, on_device<fp16, 2>, on_device<fp16, 3>, on_device<fp16, 1>,
                                    on_device<float, 2>, on_device<float, 1>, arena<exec::cuda_memory>&);
