/// What other emulated libraries (cuBLASLt, NCCL) are built on: calls that count and can be made to fail,
/// work in streams, and access to device memory by host code that the checks know about.
#ifndef TESSERA_CUDA_EMULATION_LIBRARY_HPP
#define TESSERA_CUDA_EMULATION_LIBRARY_HPP

#include <cstdint>
#include <functional>

#include <cuda_emulation/control.hpp>

namespace cuda_emulation {

/// At the start of every function of an emulated library: counts the call; an error other than cudaSuccess is
/// to be returned (in the library's own words) without doing anything.
cudaError_t begin_call(char const* name);
/// Where a library returns an error of its own: `name` counts among the unchecked until `checked_error`.
void returned_error(char const* name, int code);
/// The library's function that gives an error's name or text was called.
void checked_error(int code);

/// Work for a stream, run when somebody waits for it. It returns true when done, and false when it has to be
/// tried again later because it waits for something in other streams or threads; then it has done nothing.
/// In a stream that is being captured it goes to the graph, and is run at each launch.
cudaError_t enqueue(cudaStream_t stream, char const* what, std::function<bool()> work);
/// The stream's device; of a null stream the current one.
int device_of(cudaStream_t stream);
bool is_capturing(cudaStream_t stream);
/// Runs what is in the stream so far.
cudaError_t drain(cudaStream_t stream);
/// Something changed that work in a stream may wait for.
void wake();

/// Host code is about to read device or pinned memory, or has been asked to write it: `what` for the message.
/// A fault is recorded for memory that does not exist or, when reading, that nobody wrote, and false
/// returned. Memory of the host (pageable) passes. `write_memory` marks it as written.
bool read_memory(void const* memory, std::size_t bytes, char const* what);
bool write_memory(void* memory, std::size_t bytes, char const* what);
/// The device that the memory belongs to; -1 for memory of the host.
int device_of_memory(void const* memory);

void record_fault(fault_kind kind, int device, std::string message);

} // namespace cuda_emulation

#endif
