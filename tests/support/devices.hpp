/// How many ranks a test can have a device each for.
#ifndef TESSERA_TESTS_SUPPORT_DEVICES_HPP
#define TESSERA_TESTS_SUPPORT_DEVICES_HPP

#include <algorithm>

#include <doctest/doctest.h>

#include <tessera/exec/cuda.hpp>

#if defined(TESSERA_CUDA_EMULATION)
#include <cuda_emulation/control.hpp>
#endif

namespace test {

/// Ranks that this machine has devices for, at most `wanted`; says so where they are fewer. The emulation has
/// four.
inline int ranks_here(int wanted) {
#if defined(TESSERA_CUDA_EMULATION)
  cuda_emulation::set_device_count(4);
#endif
  auto const devices = tessera::exec::cuda_devices();
  if (devices < wanted) MESSAGE("not run on " << wanted << " ranks: there are " << devices << " devices");
  return std::min(wanted, devices);
}

} // namespace test

#endif
