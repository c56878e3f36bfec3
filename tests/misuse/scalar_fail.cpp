// Narrow scalars lose digits only where the program says so, and what is no storage type is refused by name.
#include <tessera/core/extents.hpp>
#include <tessera/core/scalar.hpp>

using namespace tessera;

template <storage_scalar T>
constexpr int width_of() {
  return sizeof(T);
}

int main() {
  auto const x = bf16(1.5f);
  [[maybe_unused]] index_t n = 3;
#if MISUSE == 1
  return width_of<int>(); // expect-error: storage_scalar
#elif MISUSE == 2
  auto const y = narrow<float>(n); // expect-error: integral
  return static_cast<int>(y);
#endif
  return static_cast<float>(x) == 1.5f && width_of<bf16>() == 2 && narrow<int>(n) == 3 ? 0 : 1;
}
