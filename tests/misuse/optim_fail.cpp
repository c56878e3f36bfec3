// An optimizer is what the concept says, over the types it was made for.
#include <vector>

#include <tessera/exec/host.hpp>
#include <tessera/optim/adamw.hpp>
#include <tessera/optim/optimizer.hpp>

using namespace tessera;

template <class O>
  requires optim::optimizer<O, exec::host, float, float>
void train_with(O&) {}

int main() {
  exec::host ex({.threads = 1});
  optim::adamw<exec::host, float> o(ex, 8, {}, {});
  train_with(o);
#if MISUSE == 1
  std::vector<float> weights;
  train_with(weights); // expect-error: optimizer
#elif MISUSE == 2
  optim::adamw<exec::host, int> integers(ex, 8, {}, {}); // expect-error: storage_scalar
#elif MISUSE == 3
  optim::adamw<int, float> nowhere(ex, 8, {}, {}); // expect-error: exec::space|space<int>
#endif
}
