// Operations on elements and rows, for every storage type.
#include <tessera/ops/cuda/add.cuh>
#include <tessera/ops/cuda/cast.cuh>
#include <tessera/ops/cuda/copy_rows.cuh>
#include <tessera/ops/cuda/dropout.cuh>
#include <tessera/ops/cuda/gelu.cuh>
#include <tessera/ops/cuda/random_normal.cuh>
#include <tessera/ops/cuda/reduce.cuh>
#include <tessera/ops/cuda/rotary.cuh>
#include <tessera/ops/cuda/scale.cuh>
#include <tessera/ops/cuda/swiglu.cuh>

using namespace tessera;
template <class T, int Rank>
using on_device = view<T, Rank, exec::cuda_memory>;

template <storage_scalar T>
void elements(exec::cuda& ex, on_device<T, 1> flat, on_device<T, 2> rows, on_device<T, 4> heads) {
  ops::add(ex, flat, flat, flat);
  ops::cast(ex, flat, on_device<float, 1>{});
  ops::cast(ex, on_device<float, 1>{}, flat);
  ops::copy_rows(ex, heads, heads);
  ops::copy_rows(ex, heads, on_device<float, 4>{});
  ops::copy_rows(ex, on_device<float, 4>{}, heads);
  ops::add_rows(ex, on_device<float, 4>{}, heads);
  ops::dropout(ex, rows, rows, {});
  ops::dropout(ex, rows, on_device<float, 2>{}, {});
  ops::dropout(ex, on_device<float, 2>{}, rows, {});
  ops::dropout_add(ex, rows, rows, rows, {});
  ops::gelu(ex, flat, flat);
  ops::gelu_backward(ex, flat, flat, flat);
  ops::random_normal(ex, flat, {});
  ops::rotary(ex, heads);
  ops::scale(ex, flat, flat, 2.0f);
  ops::fill(ex, flat, 0.0f);
  ops::swiglu(ex, rows, rows);
  ops::swiglu_backward(ex, rows, rows, rows);
  (void)(ops::sum(ex, flat) + ops::sum_of_squares(ex, flat));
  (void)ops::all_finite(ex, flat);
}
template void elements<float>(exec::cuda&, on_device<float, 1>, on_device<float, 2>, on_device<float, 4>);
template void elements<bf16>(exec::cuda&, on_device<bf16, 1>, on_device<bf16, 2>, on_device<bf16, 4>);
template void elements<fp16>(exec::cuda&, on_device<fp16, 1>, on_device<fp16, 2>, on_device<fp16, 4>);
