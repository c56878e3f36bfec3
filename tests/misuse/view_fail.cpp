// Views of other ranks, types or constness are not taken for one another, and no owner is copied by accident.
#include <utility>

#include <tessera/core/tensor.hpp>

using namespace tessera;

void takes(view<float, 2>) {}

int main() {
  tensor<float, 2> x({2, 3});
  takes(x);
#if MISUSE == 1
  tensor<float, 1> flat({6});
  takes(flat.view()); // expect-error: view<float, 1>.*view<float, 2>|view<float, 2>.*view<float, 1>
#elif MISUSE == 2
  takes(std::as_const(x).view()); // expect-error: float const|const float
#elif MISUSE == 3
  auto copy = x; // expect-error: deleted
#elif MISUSE == 4
  return static_cast<int>(x(1)); // expect-error: sizeof\.\.\. ?\(Index\)
#elif MISUSE == 5
  tensor<tensor<float, 1>, 1> nested({1}); // expect-error: is_trivially_copyable
#endif
}
