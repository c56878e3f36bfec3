// Attention, for every storage type and head size.
#include <tessera/ops/cuda/attention.cuh>
#include <tessera/ops/cuda/merge_attention.cuh>

using namespace tessera;
template <class T, int Rank>
using on_device = view<T, Rank, exec::cuda_memory>;

template <storage_scalar T>
void attention(exec::cuda& ex, on_device<T, 4> x, on_device<float, 3> log_sum_exp) {
  ops::attention(ex, x, log_sum_exp, x, x, x);
  ops::attention_backward(ex, x, x, x, x, x, x, x, x, log_sum_exp);
  ops::merge_attention(ex, on_device<float, 4>{}, log_sum_exp, x, log_sum_exp);
}
template void attention<float>(exec::cuda&, on_device<float, 4>, on_device<float, 3>);
template void attention<bf16>(exec::cuda&, on_device<bf16, 4>, on_device<float, 3>);
template void attention<fp16>(exec::cuda&, on_device<fp16, 4>, on_device<float, 3>);
