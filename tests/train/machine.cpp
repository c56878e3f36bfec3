#include <doctest/doctest.h>

#include <tessera/exec/host.hpp>
#include <tessera/train/machine.hpp>

using namespace tessera;

TEST_CASE("the measured matrix peak is a positive rate in every storage type") {
  exec::host ex({.threads = 1});
  CHECK(train::matrix_peak<float>(ex, {.size = 64, .tries = 2}) > 0);
  CHECK(train::matrix_peak<bf16>(ex, {.size = 64, .tries = 2}) > 0);
}
