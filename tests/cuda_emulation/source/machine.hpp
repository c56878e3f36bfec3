/// Inside of the emulation. None of this is compiled with instrumentation.
#ifndef TESSERA_CUDA_EMULATION_MACHINE_HPP
#define TESSERA_CUDA_EMULATION_MACHINE_HPP

#include <cstdint>
#include <string>
#include <vector>

#include <cuda_runtime.h>

#include <cuda_emulation/library.hpp>

namespace cuda_emulation {

using address = std::uintptr_t;

// ---- where things lie
// Device memory and pinned memory are one range, so that the commonest access (host code that touches
// neither) is told by one comparison. Each byte has a byte of shadow at a fixed distance.

inline constexpr int most_devices = 8;
inline constexpr address device_bytes = address{16} << 30;
inline constexpr address device_begin = address{0x1000} << 32;
inline constexpr address pinned_begin = device_begin + most_devices * device_bytes;
inline constexpr address pinned_bytes = address{16} << 30;
inline constexpr address known_bytes = most_devices * device_bytes + pinned_bytes;
inline constexpr address shadow_distance = address{0x100} << 32;

/// Bits of a byte of shadow.
inline constexpr unsigned char allocated = 1, written = 2, will_be_written = 4, will_be_read = 8;

inline unsigned char* shadow_of(address a) {
  return reinterpret_cast<unsigned char*>(a + shadow_distance);
}
inline bool is_known(address a) {
  return a - device_begin < known_bytes;
}
inline bool is_pinned(address a) {
  return a - pinned_begin < pinned_bytes;
}
inline bool is_device(address a) {
  return a - device_begin < most_devices * device_bytes;
}
inline int device_at(address a) {
  return static_cast<int>((a - device_begin) / device_bytes);
}

/// A sentence about an address: which allocation it is in, or near.
std::string describe_memory(address a);
bool was_freed(address a);
std::int64_t free_bytes(int device);

// ---- accesses of one kernel's threads to device memory

/// The latest accesses of two bytes of device memory: launch, block, thread, interval between barriers of the
/// block. Of long launches the block is not whole; a race between two that look the same is not seen.
struct global_cell {
  std::uint64_t writer, reader;
};
inline constexpr int launch_bits = 16, block_bits = 18, thread_bits = 10, interval_bits = 20;
static_assert(launch_bits + block_bits + thread_bits + interval_bits == 64);
/// Forgets all accesses.
void clear_cells();
inline constexpr address cells_begin = address{0x2000} << 32;
inline global_cell* cells_of(address a) {
  return reinterpret_cast<global_cell*>(cells_begin + (a - device_begin) / 2 * sizeof(global_cell));
}

// ---- a block

inline constexpr int most_threads = 1024, most_warps = 32;
inline constexpr std::size_t stack_bytes = std::size_t{128} << 10;
inline constexpr std::size_t most_shared_bytes = std::size_t{227} << 10;

/// The latest accesses of four bytes of shared memory, or of one byte where they are looked at one by one.
struct shared_cell {
  std::uint32_t write_epoch, read_epoch; // intervals between block barriers; zero: never
  std::uint32_t reader_lanes;
  std::uint32_t single_epoch; // the interval since which the four bytes have cells of their own
  std::uint16_t writer;       // thread; or atomic accesses, as below
  std::uint16_t write_stamp, read_stamp;
  std::uint8_t reader_warp;
  std::uint8_t unused;
};
inline constexpr std::uint16_t atomic_thread = 0x4000, atomic_warp = 0x8000, atomic_many = 0xffff;
inline constexpr std::uint8_t many_warps = 255;

struct shared_range {
  address begin = 0;
  std::size_t bytes = 0;
  shared_cell* cells = nullptr;        // one for each four bytes
  shared_cell* single_cells = nullptr; // one for each byte
};

struct thread_state {
  void* stack_pointer = nullptr;
  char* stack = nullptr;
  uint3 index{};
  unsigned mask = 0; // of the warp operation that it waits in
  place where{};     // the operation or barrier that it waits at
  void (*act)(void* const*, unsigned) = nullptr;
};

struct warp_state {
  unsigned exists, ready, started, waiting, at_barrier, ended; // lanes
  // Order within the warp, since `sync_epoch`: the number of __syncwarp so far, and what each lane knows.
  std::uint32_t sync_epoch, stamp, full_stamp, partial_epoch;
  void* slots[32];
};

struct context {
  // The launch.
  launched const* kernel = nullptr;
  dim3 grid, block;
  int device = 0;
  std::size_t shared_bytes = 0;
  std::uint64_t launch_number = 0;
  bool peers[most_devices] = {};
  bool check_races = true;

  // The block.
  uint3 block_index{};
  std::uint64_t block_number = 0;
  int threads = 0, ended = 0, arrived = 0;
  int barrier_sum = 0, barrier_result = 0;
  place barrier_place{};
  int first_at_barrier = 0;
  std::uint32_t epoch = 0, first_epoch = 0; // intervals between block barriers, over all blocks and kernels
  unsigned ready_warps = 0;
  bool fenced = false;
  warp_state warps[most_warps];
  thread_state* states = nullptr;
  std::uint32_t (*clocks)[32][32] = nullptr; // [warp][lane][other lane]: stamps before this one are ordered

  // The running thread.
  int current = 0;
  thread_state* state = nullptr;
  warp_state* warp = nullptr;
  std::uint64_t signature = 0; // launch, block and thread, as in global_cell
  address own_memory = 0;      // where the device's begins

  shared_range static_shared, dynamic_shared;
  void* main_stack_pointer = nullptr;
  char* stacks[most_threads + 1] = {};      // all there are
  char* free_stacks[most_threads + 1] = {}; // those that nobody stands on
  int stack_count = 0, free_count = 0;

  // What went wrong.
  bool failed = false;
  fault_kind kind{};
  std::string message;
  void const* at = nullptr; // address of the code
};

/// The block that this thread of the operating system is running, while one of its threads runs.
extern __thread context* running;

cudaError_t run_grid(launched const& kernel, dim3 grid, dim3 block, std::size_t shared_bytes, int device);
/// Ends the kernel; from device code, through FAIL.
[[noreturn]] void fail(context& c, fault_kind kind, std::string message, void const* at = nullptr);
/// While a thread of a kernel runs, the emulation itself calls no functions of the standard library that are
/// not inlined: the linker may have taken the test's copy of them, which is instrumented. A message is built
/// when the kernel has stopped.
#define FAIL(...) (::cuda_emulation::running = nullptr, ::cuda_emulation::fail(__VA_ARGS__))

/// Thread 37 (5, 1, 0) of the block.
std::string describe_thread(context const& c, int thread);
std::string describe_place(place where);
/// "at gelu.cu:42 in gelu_kernel<float>", or nothing where there is no debug information.
std::string describe_code(void const* at);
std::string name_of_function(void const* function);
/// The thread-local variable of the program at this offset in its segment.
std::string describe_shared_variable(address offset);

/// Begin and size of this thread's copy of the program's thread-local segment.
void find_thread_locals(address& begin, std::size_t& bytes);

// ---- devices

/// The error that the device is stuck in.
cudaError_t stuck(int device);
void set_stuck(int device, cudaError_t error);
int current_device();
int device_count();
bool peer_enabled(int device, int peer);
cudaError_t finish_call(char const* name, cudaError_t error);

/// Copies as the devices do: checks both sides, and what is unwritten stays so.
bool copy_memory(void* to, void const* from, std::size_t bytes);
/// Host code may not touch pinned memory that a stream is going to use.
void mark_pending(void const* memory, std::size_t bytes, unsigned char bit);
void unmark_pending(void const* memory, std::size_t bytes, unsigned char bit);

} // namespace cuda_emulation

#endif
