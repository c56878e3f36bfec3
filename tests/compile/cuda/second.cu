#include <tessera/cuda.cuh>

int second();
int second() {
  return TESSERA_VERSION > 0 ? 0 : 1;
}
