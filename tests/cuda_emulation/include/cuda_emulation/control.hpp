/// What a test asks the emulation: which faults it found, which errors nobody looked at; and what it sets.
///
///     run();
///     for (auto const& fault : cuda_emulation::take_faults()) ...   // empty: nothing was wrong
///
/// A program that ends with faults that nobody took, or with errors that nobody looked at, prints them and
/// ends with status 86, whatever its main returned.
#ifndef TESSERA_CUDA_EMULATION_CONTROL_HPP
#define TESSERA_CUDA_EMULATION_CONTROL_HPP

#include <cstdint>
#include <string>
#include <vector>

#include <cuda_runtime_api.h>

namespace cuda_emulation {

enum class fault_kind {
  out_of_bounds,   ///< an address that is no memory of the device, or after the end of a piece of it
  use_after_free,  ///< memory that was given back
  unwritten_read,  ///< memory that nobody wrote
  race,            ///< two threads, at least one writing, with no barrier between them
  misaligned,      ///< an access that does not begin at a multiple of its size
  barrier,         ///< a barrier that not all threads reach, or not at the same place
  warp_mask,       ///< a mask without the caller, or with lanes that do not come
  hang,            ///< threads that wait for one another in vain
  host_pointer,    ///< a kernel that uses memory of the host
  device_pointer,  ///< host code that uses memory of a device
  synchronisation, ///< host code that uses memory that a stream has yet to read or write
  trap,            ///< the kernel gave up by itself
};
char const* name_of(fault_kind kind) noexcept;

struct fault {
  fault_kind kind;
  std::string message;
};

/// What was found so far, in order.
std::vector<fault> faults();
/// The same; afterwards there are none, and the devices work again.
std::vector<fault> take_faults();
/// Whether faults are printed to stderr as they are found. At first they are.
void print_faults(bool print) noexcept;

/// How often functions of CUDA (and of the emulated libraries) were called by this thread.
std::int64_t calls() noexcept;
/// The call of this thread that comes `after` others from now on fails with `error` and does nothing.
/// A negative number calls it off.
void fail_call(std::int64_t after, cudaError_t error) noexcept;
/// Names of calls whose error nobody asked the name of (cudaGetErrorName, cudaGetErrorString) or fetched
/// (cudaGetLastError) before the next call failed; and forgets them.
std::vector<std::string> take_unchecked_errors();

/// Machines have 2 devices at first. At most 8; 0: none, as on a machine without a GPU.
void set_device_count(int count) noexcept;
/// Device memory that has been given out: bytes, and pieces.
std::int64_t bytes_in_use() noexcept;
std::int64_t pieces_in_use() noexcept;
/// From now on a read of this device memory is a read of memory that nobody wrote. For outputs of which all
/// must be written.
void forget(void* memory, std::size_t bytes);
/// Ranges entered and not left in this thread (nvtxRangePush, nvtxRangePop).
int open_ranges() noexcept;
/// Blocks run in rising order; or falling, to show that results do not depend on it.
void run_blocks_backwards(bool backwards) noexcept;
/// Whether accesses of one kernel's threads to device memory are checked against one another. At first they
/// are.
void check_device_races(bool check) noexcept;

} // namespace cuda_emulation

#endif
