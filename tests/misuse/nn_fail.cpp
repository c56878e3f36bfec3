// A model is of an execution space and of storage types, calls back with the number of a unit, and is shared
// by ranks that a group describes.
#include <string>
#include <vector>

#include <tessera/exec/host.hpp>
#include <tessera/nn/model.hpp>

using namespace tessera;

int main() {
  exec::host ex({.threads = 1});
  nn::transformer_config const config;
  nn::model<exec::host, bf16, float> model(config, {.batch = 1, .sequence_length = 8});
  tensor<std::int32_t, 2> tokens({1, 8}), targets({1, 8});
  model.forward_backward(ex, tokens.view(), targets.view(), {.step = 1}, [](std::size_t) {});
#if MISUSE == 1
  nn::model<std::vector<int>, bf16, float> nowhere(config, {}); // expect-error: exec::space|space<std::vector
#elif MISUSE == 2
  nn::model<exec::host, double, float> wide(config, {}); // expect-error: storage_scalar
#elif MISUSE == 3
  nn::model<exec::host, bf16, int> counted(config, {}); // expect-error: storage_scalar
#elif MISUSE == 4
  model.forward_backward(ex, tokens.view(), targets.view(), {},
                         [](std::string) {}); // expect-error: invocable
#elif MISUSE == 5
  tensor<float, 2> embedded({1, 8});
  model.evaluate(ex, embedded.view(), targets.view()); // expect-error: view<.*int
#elif MISUSE == 6
  model.forward_backward(ex, tokens.view(), targets.view(),
                         {.gradient_clip = 1}); // expect-error: gradient_clip|to 'tessera::nn::pass'
#elif MISUSE == 7
  auto units = nn::make_transformer<exec::host, bf16, float>(config, 5, {0, 2}); // expect-error: rank_group
#endif
}
