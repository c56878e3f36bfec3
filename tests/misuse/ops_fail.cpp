// Operations take the views they say: the same storage type where it matters, the right rank, memory that the
// execution space reaches, and options by their names.
#include <tessera/core/tensor.hpp>
#include <tessera/exec/host.hpp>
#include <tessera/ops/add.hpp>
#include <tessera/ops/matmul.hpp>

using namespace tessera;

struct elsewhere {
  static constexpr bool host_accessible = false;
  static constexpr char const* name = "elsewhere";
};

int main() {
  exec::host ex({.threads = 1});
  tensor<float, 2> a({2, 2}), b({2, 2}), c({2, 2});
  tensor<float, 1> x({4}), y({4});
  ops::matmul(ex, c.view(), a.view(), b.view(), {.transpose_b = true});
  ops::add(ex, x.view(), x.view(), y.view());
#if MISUSE == 1
  tensor<int, 2> counts({2, 2});
  ops::matmul(ex, c.view(), counts.view(), b.view()); // expect-error: matrix_scalar|storage_scalar
#elif MISUSE == 2
  ops::matmul(ex, x.view(), a.view(), b.view()); // expect-error: no matching function
#elif MISUSE == 3
  tensor<bf16, 1> narrow_input({4});
  ops::add(ex, x.view(), narrow_input.view(), y.view()); // expect-error: no matching function.*bf16|bf16
#elif MISUSE == 4
  view<float, 1, elsewhere> far_away;
  ops::add(ex, far_away, far_away, far_away); // expect-error: elsewhere
#elif MISUSE == 5
  ops::matmul(ex, c.view(), a.view(), b.view(), {.transpose_c = true}); // expect-error: transpose_c
#elif MISUSE == 6
  int stream = 0;
  ops::add(stream, x.view(), x.view(), y.view()); // expect-error: exec::space|space<int>
#elif MISUSE == 7
  ops::add(ex, view<float const, 1>(x.view()), x.view(), y.view()); // expect-error: const
#endif
}
