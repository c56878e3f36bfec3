// The whole library as a CUDA program includes it; what it defines without `inline`, second.cu defines again.
#include <tessera/tessera.hpp>

int second();
int main() {
  return second();
}
