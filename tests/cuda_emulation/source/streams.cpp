/// Streams, events, graphs, copies, launches. A stream is a queue that is worked off when somebody waits for
/// it, and no sooner: a program that does not wait sees that nothing has been done.
#include "machine.hpp"

#include <algorithm>
#include <chrono>
#include <condition_variable>
#include <deque>
#include <map>
#include <memory>
#include <mutex>

#include <cuda_emulation/library.hpp>

namespace cuda_emulation {
void* take_memory(int device, std::size_t bytes);
void* take_pinned(std::size_t bytes);
bool is_piece(void const* pointer);
bool give_back(void* pointer);
std::int64_t bytes_in_use(int device);
std::int64_t most_bytes_in_use(int device);
} // namespace cuda_emulation

using namespace cuda_emulation;
using work_function = std::function<bool()>;

namespace {

/// Pinned memory that an operation is going to use.
struct pending {
  void const* memory;
  std::size_t bytes;
  unsigned char bit;
};

struct operation {
  char const* what;
  work_function work;
  std::vector<pending> pendings;
  std::vector<std::pair<std::shared_ptr<CUstream_st>, std::uint64_t>> after; // stream, its operations
  bool always = false; // done even on a device that is stuck
};

struct capture {
  cudaStreamCaptureMode mode;
  CUstream_st* origin;
  std::vector<operation> operations;
  std::map<CUstream_st*, std::uint64_t> issued, joined;
  bool invalid = false;
  std::size_t thread;
};

std::size_t this_thread() {
  static thread_local char here;
  return reinterpret_cast<std::size_t>(&here);
}

} // namespace

struct CUstream_st : std::enable_shared_from_this<CUstream_st> {
  int number = 0, device = 0, priority = 0;
  unsigned flags = 0;
  std::deque<operation> queue;
  std::uint64_t issued = 0, done = 0;
  bool busy = false;
  std::shared_ptr<capture> capturing;
};

struct CUevent_st {
  unsigned flags = 0;
  int device = 0;
  std::shared_ptr<CUstream_st> stream;
  std::uint64_t after = 0;
  std::shared_ptr<std::chrono::steady_clock::time_point> time;
  // In a capture.
  std::weak_ptr<capture> captured;
  std::uint64_t captured_after = 0;
};

struct CUgraph_st {
  std::shared_ptr<std::vector<operation>> operations;
};
struct CUgraphExec_st {
  std::shared_ptr<std::vector<operation>> operations;
};

namespace {

struct machine {
  std::mutex mutex;
  std::condition_variable changed;
  std::vector<std::shared_ptr<CUstream_st>> streams; // one default stream of each device first
  std::vector<std::shared_ptr<capture>> captures;
  std::map<std::pair<int, void const*>, int> dynamic_limits;
  bool peers[most_devices][most_devices] = {};
  int devices = 2, numbers = 0;

  machine() {
    for (int d = 0; d < most_devices; ++d) {
      streams.push_back(std::make_shared<CUstream_st>());
      streams.back()->device = d;
    }
    numbers = 0;
  }
};
machine& all() {
  static auto* const made = new machine;
  return *made;
}
thread_local int device_of_thread = 0;

using guard = std::unique_lock<std::mutex>;

// ---- working off

enum class progress { made, empty, busy, not_yet };

/// Tries the stream's first operation, or one that it waits for.
progress step(CUstream_st& stream, guard& lock) {
  if (stream.busy) return progress::busy;
  if (stream.queue.empty()) return progress::empty;
  auto& first = stream.queue.front();
  for (auto const& [other, count] : first.after)
    if (other->done < count) {
      auto const keep = other;
      return step(*keep, lock);
    }
  auto const keep = stream.shared_from_this();
  stream.busy = true;
  bool finished = true;
  if (first.always || stuck(stream.device) == cudaSuccess) {
    lock.unlock();
    finished = first.work();
    lock.lock();
  }
  stream.busy = false;
  if (!finished) return progress::not_yet;
  auto const held = static_cast<operation&&>(stream.queue.front()); // destroyed at the end
  stream.queue.pop_front();
  ++stream.done;
  for (auto const& p : held.pendings) unmark_pending(p.memory, p.bytes, p.bit);
  all().changed.notify_all();
  return progress::made;
}

/// Tries an operation that the stream waits for; true if one was done. It may be in another stream, which
/// nobody is working off: the other side of a message, or what the other side's rank waits for.
bool move(CUstream_st& stream, guard& lock) {
  auto const result = step(stream, lock);
  if (result != progress::not_yet) return result == progress::made;
  auto const others = all().streams;
  for (auto const& other : others)
    if (other.get() != &stream && step(*other, lock) == progress::made) return true;
  return false;
}

/// Until the stream has done `count` operations.
void work_off(CUstream_st& stream, std::uint64_t count, guard& lock) {
  auto const keep = stream.shared_from_this();
  while (stream.done < count)
    if (!move(stream, lock)) all().changed.wait_for(lock, std::chrono::milliseconds(1));
}

void work_off_device(int device, guard& lock) {
  // The newest first: what depends on nothing comes in an unusual order.
  auto const streams = all().streams;
  for (auto it = streams.rbegin(); it != streams.rend(); ++it)
    if ((*it)->device == device) work_off(**it, (*it)->issued, lock);
}

CUstream_st* resolve(cudaStream_t stream) {
  if (stream == nullptr || stream == cudaStreamLegacy || stream == cudaStreamPerThread)
    return all().streams[static_cast<std::size_t>(device_of_thread)].get();
  for (auto const& known : all().streams)
    if (known.get() == stream) return stream;
  return nullptr;
}

bool is_default(CUstream_st const& stream) {
  return all().streams[static_cast<std::size_t>(stream.device)].get() == &stream;
}

/// The capture that a call of this thread, which would wait or allocate, would break.
capture* forbidding_capture() {
  for (auto const& c : all().captures)
    if (c->mode == cudaStreamCaptureModeGlobal ||
        (c->mode == cudaStreamCaptureModeThreadLocal && c->thread == this_thread()))
      return c.get();
  return nullptr;
}

cudaError_t put(CUstream_st& stream, operation made) {
  auto& m = all();
  if (stream.capturing != nullptr) {
    auto& c = *stream.capturing;
    if (c.invalid) return cudaErrorStreamCaptureInvalidated;
    ++c.issued[&stream];
    c.operations.push_back(static_cast<operation&&>(made));
    return cudaSuccess;
  }
  if (auto const error = stuck(stream.device); error != cudaSuccess && !made.always) return error;
  if (is_default(stream)) {
    for (auto const& other : m.streams) {
      if (other.get() == &stream || other->device != stream.device ||
          (other->flags & cudaStreamNonBlocking) != 0)
        continue;
      if (other->capturing != nullptr) {
        other->capturing->invalid = true;
        return cudaErrorStreamCaptureImplicit;
      }
      made.after.push_back({other, other->issued});
    }
  } else if ((stream.flags & cudaStreamNonBlocking) == 0) {
    auto const& first = m.streams[static_cast<std::size_t>(stream.device)];
    made.after.push_back({first, first->issued});
  }
  for (auto const& p : made.pendings) mark_pending(p.memory, p.bytes, p.bit);
  stream.queue.push_back(static_cast<operation&&>(made));
  ++stream.issued;
  return cudaSuccess;
}

/// One operation that does all of a graph's.
operation replay(std::shared_ptr<std::vector<operation>> operations) {
  operation made{"graph", {}, {}, {}, false};
  for (auto const& o : *operations)
    made.pendings.insert(made.pendings.end(), o.pendings.begin(), o.pendings.end());
  made.work = [operations, next = std::make_shared<std::size_t>(0)] {
    for (; *next < operations->size(); ++*next)
      if (!(*operations)[*next].work()) return false;
    *next = 0;
    return true;
  };
  return made;
}

/// What every function begins and ends with.
template <class F>
cudaError_t call(char const* name, F f) {
  auto error = begin_call(name);
  if (error == cudaSuccess) error = f();
  return finish_call(name, error);
}
template <class F>
cudaError_t locked_call(char const* name, F f) {
  return call(name, [&] {
    guard lock(all().mutex);
    return f(lock);
  });
}

/// Waiting is not possible while it would have to wait for what is only being recorded.
cudaError_t may_wait(CUstream_st& stream) {
  if (stream.capturing == nullptr) return cudaSuccess;
  stream.capturing->invalid = true;
  return cudaErrorStreamCaptureUnsupported;
}
cudaError_t may_wait_for_all() {
  auto* const c = forbidding_capture();
  if (c == nullptr) return cudaSuccess;
  c->invalid = true;
  return cudaErrorStreamCaptureUnsupported;
}

// ---- copies

bool direction_fits(cudaMemcpyKind kind, void const* to, void const* from) {
  auto const t = is_device(reinterpret_cast<address>(to)), f = is_device(reinterpret_cast<address>(from));
  switch (kind) {
  case cudaMemcpyHostToHost:
    return !t && !f;
  case cudaMemcpyHostToDevice:
    return t && !f;
  case cudaMemcpyDeviceToHost:
    return !t && f;
  case cudaMemcpyDeviceToDevice:
    return t && f;
  case cudaMemcpyDefault:
    return true;
  }
  return false;
}

struct rectangle {
  std::size_t to_pitch, from_pitch, width, height;
};

bool copy_rectangle(char* to, char const* from, rectangle const& r) {
  for (std::size_t y = 0; y < r.height; ++y)
    if (!copy_memory(to + y * r.to_pitch, from + y * r.from_pitch, r.width)) break;
  return true;
}

cudaError_t copy(void* to, void const* from, rectangle const& r, cudaMemcpyKind kind, cudaStream_t handle,
                 bool wait, guard& lock) {
  auto* const stream = resolve(handle);
  if (stream == nullptr) return cudaErrorInvalidResourceHandle;
  if (r.width == 0 || r.height == 0) return stuck(stream->device);
  if (to == nullptr || from == nullptr) return cudaErrorInvalidValue;
  if (!direction_fits(kind, to, from)) return cudaErrorInvalidMemcpyDirection;
  if (r.height > 1 && (r.to_pitch < r.width || r.from_pitch < r.width)) return cudaErrorInvalidValue;
  auto const t = reinterpret_cast<address>(to), f = reinterpret_cast<address>(from);
  operation made{"copy", {}, {}, {}, false};
  auto const pageable_source = !is_known(f), pageable_target = !is_known(t);
  auto* const to_bytes = static_cast<char*>(to);
  auto const* const from_bytes = static_cast<char const*>(from);
  if (pageable_source && !pageable_target && !wait && stream->capturing == nullptr) {
    // The runtime takes a copy of its own before it returns.
    auto const held = std::make_shared<std::vector<char>>(r.width * r.height);
    for (std::size_t y = 0; y < r.height; ++y)
      std::memcpy(held->data() + y * r.width, from_bytes + y * r.from_pitch, r.width);
    made.work = [=] {
      return copy_rectangle(to_bytes, held->data(), {r.to_pitch, r.width, r.width, r.height});
    };
  } else {
    made.work = [=] { return copy_rectangle(to_bytes, from_bytes, r); };
  }
  auto const span = [&](std::size_t pitch) { return (r.height - 1) * pitch + r.width; };
  if (is_pinned(t)) made.pendings.push_back({to, span(r.to_pitch), will_be_written});
  if (is_pinned(f)) made.pendings.push_back({from, span(r.from_pitch), will_be_read});
  if (wait) {
    if (auto const error = may_wait_for_all(); error != cudaSuccess) return error;
  }
  if (auto const error = put(*stream, static_cast<operation&&>(made)); error != cudaSuccess) return error;
  if ((wait || pageable_target) && stream->capturing == nullptr) work_off(*stream, stream->issued, lock);
  return stuck(stream->device);
}

cudaError_t set(void* to, int value, std::size_t bytes, cudaStream_t handle) {
  auto* const stream = resolve(handle);
  if (stream == nullptr) return cudaErrorInvalidResourceHandle;
  if (bytes == 0) return stuck(stream->device);
  if (!is_known(reinterpret_cast<address>(to))) return cudaErrorInvalidValue;
  operation made{"memset", {}, {}, {}, false};
  made.work = [=] {
    if (write_memory(to, bytes, "a memset")) std::memset(to, value, bytes);
    return true;
  };
  if (is_pinned(reinterpret_cast<address>(to))) made.pendings.push_back({to, bytes, will_be_written});
  return put(*stream, static_cast<operation&&>(made));
}

} // namespace

// ---- what other parts ask

namespace cuda_emulation {

int current_device() {
  return device_of_thread;
}
int device_count() {
  return all().devices;
}
bool peer_enabled(int device, int peer) {
  return all().peers[device][peer];
}
void set_device_count(int count) noexcept {
  all().devices = std::clamp(count, 0, most_devices);
}

int device_of(cudaStream_t stream) {
  guard const lock(all().mutex);
  auto* const found = resolve(stream);
  return found == nullptr ? -1 : found->device;
}
bool is_capturing(cudaStream_t stream) {
  guard const lock(all().mutex);
  auto* const found = resolve(stream);
  return found != nullptr && found->capturing != nullptr;
}
void wake() {
  all().changed.notify_all();
}

cudaError_t enqueue(cudaStream_t handle, char const* what, work_function work) {
  guard const lock(all().mutex);
  auto* const stream = resolve(handle);
  if (stream == nullptr) return cudaErrorInvalidResourceHandle;
  operation made{what, static_cast<work_function&&>(work), {}, {}, false};
  return put(*stream, static_cast<operation&&>(made));
}

cudaError_t drain(cudaStream_t handle) {
  guard lock(all().mutex);
  auto* const stream = resolve(handle);
  if (stream == nullptr) return cudaErrorInvalidResourceHandle;
  if (auto const error = may_wait(*stream); error != cudaSuccess) return error;
  work_off(*stream, stream->issued, lock);
  return stuck(stream->device);
}

cudaError_t allocate(void** memory, std::size_t bytes) {
  return locked_call("cudaMalloc", [&](guard&) {
    if (auto const error = may_wait_for_all(); error != cudaSuccess) return error;
    if (auto const error = stuck(device_of_thread); error != cudaSuccess) return error;
    if (memory == nullptr) return cudaErrorInvalidValue;
    *memory = bytes == 0 ? nullptr : take_memory(device_of_thread, bytes);
    return *memory == nullptr && bytes > 0 ? cudaErrorMemoryAllocation : cudaSuccess;
  });
}

cudaError_t allocate_async(void** memory, std::size_t bytes, cudaStream_t handle) {
  return locked_call("cudaMallocAsync", [&](guard&) {
    auto* const stream = resolve(handle);
    if (memory == nullptr) return cudaErrorInvalidValue;
    if (stream == nullptr) return cudaErrorInvalidResourceHandle;
    if (auto const error = stuck(stream->device); error != cudaSuccess) return error;
    if (auto const error = may_wait(*stream); error != cudaSuccess)
      return error; // no memory nodes in graphs here
    *memory = bytes == 0 ? nullptr : take_memory(stream->device, bytes);
    if (bytes == 0) return cudaSuccess;
    if (*memory == nullptr) return cudaErrorMemoryAllocation;
    // It is there for whoever comes later in the stream; for others not before that has been reached.
    auto* const shadow = shadow_of(reinterpret_cast<address>(*memory));
    std::memset(shadow, 0, bytes);
    operation made{"allocation", {}, {}, {}, false};
    made.work = [shadow, bytes] {
      std::memset(shadow, allocated, bytes);
      return true;
    };
    return put(*stream, static_cast<operation&&>(made));
  });
}

cudaError_t allocate_pinned(void** memory, std::size_t bytes, unsigned) {
  return locked_call("cudaHostAlloc", [&](guard&) {
    if (auto const error = may_wait_for_all(); error != cudaSuccess) return error;
    if (auto const error = stuck(device_of_thread); error != cudaSuccess) return error;
    if (memory == nullptr) return cudaErrorInvalidValue;
    *memory = bytes == 0 ? nullptr : take_pinned(bytes);
    return *memory == nullptr && bytes > 0 ? cudaErrorMemoryAllocation : cudaSuccess;
  });
}

cudaError_t set_kernel_attribute(void const* kernel, cudaFuncAttribute attribute, int value) {
  return locked_call("cudaFuncSetAttribute", [&](guard&) {
    if (kernel == nullptr) return cudaErrorInvalidDeviceFunction;
    if (attribute == cudaFuncAttributeMaxDynamicSharedMemorySize) {
      if (value < 0 || static_cast<std::size_t>(value) > most_shared_bytes) return cudaErrorInvalidValue;
      all().dynamic_limits[{device_of_thread, kernel}] = value;
    }
    return cudaSuccess;
  });
}

cudaError_t occupancy(int* blocks, void const* kernel, int threads, std::size_t shared_bytes) {
  return call("cudaOccupancyMaxActiveBlocksPerMultiprocessor", [&] {
    if (blocks == nullptr || kernel == nullptr || threads < 1) return cudaErrorInvalidValue;
    auto most = std::min(2048 / ((threads + 31) / 32 * 32), 32);
    if (shared_bytes > 0)
      most = std::min(most, static_cast<int>((std::size_t{228} << 10) / (shared_bytes + 1024)));
    *blocks = threads > most_threads ? 0 : most;
    return cudaSuccess;
  });
}

cudaError_t launch(cudaLaunchConfig_t const& configuration, launched* kernel) {
  std::shared_ptr<launched> const held(kernel, kernel->destroy);
  return locked_call("cudaLaunchKernelEx", [&](guard&) {
    auto const grid = configuration.gridDim, block = configuration.blockDim;
    auto const shared_bytes = configuration.dynamicSmemBytes;
    auto* const stream = resolve(configuration.stream);
    if (stream == nullptr) return cudaErrorInvalidResourceHandle;
    if (kernel->kernel == nullptr) return cudaErrorInvalidDeviceFunction;
    if (stream->device != device_of_thread) return cudaErrorInvalidResourceHandle;
    auto const threads = std::uint64_t{block.x} * block.y * block.z;
    if (threads == 0 || threads > most_threads || block.x > 1024 || block.y > 1024 || block.z > 64)
      return cudaErrorInvalidConfiguration;
    if (grid.x == 0 || grid.y == 0 || grid.z == 0 || grid.x > 0x7fffffffu || grid.y > 65535 || grid.z > 65535)
      return cudaErrorInvalidConfiguration;
    std::size_t limit = std::size_t{48} << 10;
    auto const found = all().dynamic_limits.find({stream->device, kernel->kernel});
    if (found != all().dynamic_limits.end()) limit = std::max(limit, static_cast<std::size_t>(found->second));
    if (shared_bytes > limit) return cudaErrorInvalidValue;
    for (unsigned i = 0; i < configuration.numAttrs; ++i)
      if (configuration.attrs[i].id != cudaLaunchAttributeIgnore &&
          configuration.attrs[i].id != cudaLaunchAttributePriority)
        return cudaErrorNotSupported;
    operation made{"kernel", {}, {}, {}, false};
    made.work = [held, grid, block, shared_bytes, device = stream->device] {
      (void)run_grid(*held, grid, block, shared_bytes, device);
      return true;
    };
    return put(*stream, static_cast<operation&&>(made));
  });
}

} // namespace cuda_emulation

extern "C" {

// ---- devices

cudaError_t cudaGetDeviceCount(int* count) {
  auto const error = begin_call("cudaGetDeviceCount");
  if (error != cudaSuccess) return finish_call("cudaGetDeviceCount", error);
  *count = device_count();
  return *count == 0 ? cudaErrorNoDevice : cudaSuccess; // an answer
}
cudaError_t cudaSetDevice(int device) {
  return call("cudaSetDevice", [&] {
    if (device < 0 || device >= device_count()) return cudaErrorInvalidDevice;
    device_of_thread = device;
    return cudaSuccess;
  });
}
cudaError_t cudaGetDevice(int* device) {
  return call("cudaGetDevice", [&] { return *device = device_of_thread, cudaSuccess; });
}

/// Few multiprocessors, so that a grid of a size made for them has several turns.
static constexpr int multiprocessors = 3;

cudaError_t cudaDeviceGetAttribute(int* value, cudaDeviceAttr attribute, int device) {
  return call("cudaDeviceGetAttribute", [&] {
    if (device < 0 || device >= device_count()) return cudaErrorInvalidDevice;
    switch (attribute) {
    case cudaDevAttrMaxThreadsPerBlock:
    case cudaDevAttrMaxBlockDimX:
    case cudaDevAttrMaxBlockDimY:
      *value = 1024;
      break;
    case cudaDevAttrMaxBlockDimZ:
      *value = 64;
      break;
    case cudaDevAttrMaxGridDimX:
      *value = 0x7fffffff;
      break;
    case cudaDevAttrMaxGridDimY:
    case cudaDevAttrMaxGridDimZ:
      *value = 65535;
      break;
    case cudaDevAttrMaxSharedMemoryPerBlock:
      *value = 48 << 10;
      break;
    case cudaDevAttrWarpSize:
      *value = 32;
      break;
    case cudaDevAttrMaxRegistersPerBlock:
    case cudaDevAttrMaxRegistersPerMultiprocessor:
      *value = 65536;
      break;
    case cudaDevAttrClockRate:
      *value = 1000000;
      break;
    case cudaDevAttrMultiProcessorCount:
      *value = multiprocessors;
      break;
    case cudaDevAttrMemoryClockRate:
      *value = 1000000;
      break;
    case cudaDevAttrGlobalMemoryBusWidth:
      *value = 5120;
      break;
    case cudaDevAttrL2CacheSize:
      *value = 50 << 20;
      break;
    case cudaDevAttrMaxThreadsPerMultiProcessor:
      *value = 2048;
      break;
    case cudaDevAttrComputeCapabilityMajor:
      *value = 9;
      break;
    case cudaDevAttrComputeCapabilityMinor:
      *value = 0;
      break;
    case cudaDevAttrMaxSharedMemoryPerMultiprocessor:
      *value = 228 << 10;
      break;
    case cudaDevAttrMaxSharedMemoryPerBlockOptin:
      *value = static_cast<int>(most_shared_bytes);
      break;
    case cudaDevAttrMaxBlocksPerMultiprocessor:
      *value = 32;
      break;
    case cudaDevAttrReservedSharedMemoryPerBlock:
      *value = 1024;
      break;
    case cudaDevAttrUnifiedAddressing:
    case cudaDevAttrConcurrentKernels:
    case cudaDevAttrStreamPrioritiesSupported:
    case cudaDevAttrMemoryPoolsSupported:
      *value = 1;
      break;
    case cudaDevAttrIntegrated:
    case cudaDevAttrComputeMode:
    case cudaDevAttrManagedMemory:
    case cudaDevAttrPageableMemoryAccess:
    case cudaDevAttrCooperativeLaunch:
      *value = 0;
      break;
    default:
      return cudaErrorInvalidValue;
    }
    return cudaSuccess;
  });
}

cudaError_t cudaGetDeviceProperties(cudaDeviceProp* properties, int device) {
  return call("cudaGetDeviceProperties", [&] {
    if (device < 0 || device >= device_count()) return cudaErrorInvalidDevice;
    auto& p = *properties;
    p = {};
    std::snprintf(p.name, sizeof(p.name), "Emulated device %d", device);
    p.totalGlobalMem = device_bytes;
    p.sharedMemPerBlock = std::size_t{48} << 10;
    p.sharedMemPerBlockOptin = most_shared_bytes;
    p.sharedMemPerMultiprocessor = std::size_t{228} << 10;
    p.regsPerBlock = p.regsPerMultiprocessor = 65536;
    p.warpSize = 32;
    p.maxThreadsPerBlock = p.maxThreadsDim[0] = p.maxThreadsDim[1] = 1024;
    p.maxThreadsDim[2] = 64;
    p.maxGridSize[0] = 0x7fffffff;
    p.maxGridSize[1] = p.maxGridSize[2] = 65535;
    p.maxThreadsPerMultiProcessor = 2048;
    p.maxBlocksPerMultiProcessor = 32;
    p.multiProcessorCount = multiprocessors;
    p.major = 9;
    p.l2CacheSize = 50 << 20;
    p.memoryBusWidth = 5120;
    p.concurrentKernels = p.unifiedAddressing = p.memoryPoolsSupported = p.streamPrioritiesSupported = 1;
    p.asyncEngineCount = 3;
    p.pciBusID = device + 1;
    return cudaSuccess;
  });
}
cudaError_t cudaDeviceGetPCIBusId(char* text, int length, int device) {
  return call("cudaDeviceGetPCIBusId", [&] {
    if (device < 0 || device >= device_count()) return cudaErrorInvalidDevice;
    std::snprintf(text, static_cast<std::size_t>(length), "0000:%02x:00.0", device + 1);
    return cudaSuccess;
  });
}

cudaError_t cudaDeviceSynchronize() {
  return locked_call("cudaDeviceSynchronize", [&](guard& lock) {
    if (auto const error = may_wait_for_all(); error != cudaSuccess) return error;
    work_off_device(device_of_thread, lock);
    return stuck(device_of_thread);
  });
}
cudaError_t cudaDeviceReset() {
  return call("cudaDeviceReset", [&] { return cudaErrorNotSupported; });
}
cudaError_t cudaRuntimeGetVersion(int* version) {
  return call("cudaRuntimeGetVersion", [&] { return *version = CUDART_VERSION, cudaSuccess; });
}
cudaError_t cudaDriverGetVersion(int* version) {
  return call("cudaDriverGetVersion", [&] { return *version = CUDART_VERSION, cudaSuccess; });
}
cudaError_t cudaDeviceCanAccessPeer(int* can, int device, int peer) {
  return call("cudaDeviceCanAccessPeer", [&] {
    if (device < 0 || device >= device_count() || peer < 0 || peer >= device_count())
      return cudaErrorInvalidDevice;
    *can = device != peer;
    return cudaSuccess;
  });
}
cudaError_t cudaDeviceEnablePeerAccess(int peer, unsigned) {
  return call("cudaDeviceEnablePeerAccess", [&] {
    if (peer < 0 || peer >= device_count() || peer == device_of_thread) return cudaErrorInvalidDevice;
    auto& enabled = all().peers[device_of_thread][peer];
    if (enabled) return cudaErrorPeerAccessAlreadyEnabled;
    enabled = true;
    return cudaSuccess;
  });
}
cudaError_t cudaDeviceDisablePeerAccess(int peer) {
  return call("cudaDeviceDisablePeerAccess", [&] {
    if (peer < 0 || peer >= device_count()) return cudaErrorInvalidDevice;
    auto& enabled = all().peers[device_of_thread][peer];
    if (!enabled) return cudaErrorPeerAccessNotEnabled;
    enabled = false;
    return cudaSuccess;
  });
}
cudaError_t cudaDeviceGetStreamPriorityRange(int* least, int* greatest) {
  return call("cudaDeviceGetStreamPriorityRange", [&] { return *least = 0, *greatest = -5, cudaSuccess; });
}

// ---- memory

cudaError_t cudaMemGetInfo(std::size_t* free_memory, std::size_t* total) {
  return call("cudaMemGetInfo", [&] {
    *total = device_bytes;
    *free_memory = device_bytes - static_cast<std::size_t>(bytes_in_use(device_of_thread));
    return cudaSuccess;
  });
}

cudaError_t cudaFree(void* memory) {
  return locked_call("cudaFree", [&](guard& lock) {
    if (memory == nullptr) return cudaSuccess;
    if (auto const error = may_wait_for_all(); error != cudaSuccess) return error;
    if (!is_device(reinterpret_cast<address>(memory)) || !is_piece(memory)) return cudaErrorInvalidValue;
    auto const device = device_at(reinterpret_cast<address>(memory));
    work_off_device(device, lock);
    return give_back(memory) ? stuck(device) : cudaErrorInvalidValue;
  });
}
cudaError_t cudaFreeAsync(void* memory, cudaStream_t handle) {
  return locked_call("cudaFreeAsync", [&](guard&) {
    if (memory == nullptr) return cudaSuccess;
    auto* const stream = resolve(handle);
    if (stream == nullptr) return cudaErrorInvalidResourceHandle;
    if (!is_device(reinterpret_cast<address>(memory)) || !is_piece(memory)) return cudaErrorInvalidValue;
    if (auto const error = may_wait(*stream); error != cudaSuccess) return error;
    operation made{"free", {}, {}, {}, true};
    made.work = [memory, device = stream->device] {
      if (!give_back(memory)) {
        set_stuck(device, cudaErrorInvalidValue);
        record_fault(fault_kind::use_after_free, device,
                     "memory is given back twice: " + describe_memory(reinterpret_cast<address>(memory)));
      }
      return true;
    };
    return put(*stream, static_cast<operation&&>(made));
  });
}
cudaError_t cudaFreeHost(void* memory) {
  return locked_call("cudaFreeHost", [&](guard& lock) {
    if (memory == nullptr) return cudaSuccess;
    if (auto const error = may_wait_for_all(); error != cudaSuccess) return error;
    if (!is_pinned(reinterpret_cast<address>(memory)) || !is_piece(memory)) return cudaErrorInvalidValue;
    // Not for other devices: their streams may wait for a rank that is this thread.
    work_off_device(device_of_thread, lock);
    return give_back(memory) ? cudaSuccess : cudaErrorInvalidValue;
  });
}

cudaError_t cudaDeviceGetDefaultMemPool(cudaMemPool_t* pool, int device) {
  return call("cudaDeviceGetDefaultMemPool", [&] {
    if (device < 0 || device >= device_count()) return cudaErrorInvalidDevice;
    *pool = reinterpret_cast<cudaMemPool_t>(static_cast<std::uintptr_t>(device + 1));
    return cudaSuccess;
  });
}
cudaError_t cudaMemPoolSetAttribute(cudaMemPool_t pool, cudaMemPoolAttr, void* value) {
  return call("cudaMemPoolSetAttribute",
              [&] { return pool == nullptr || value == nullptr ? cudaErrorInvalidValue : cudaSuccess; });
}
cudaError_t cudaMemPoolGetAttribute(cudaMemPool_t pool, cudaMemPoolAttr attribute, void* value) {
  return call("cudaMemPoolGetAttribute", [&] {
    if (pool == nullptr || value == nullptr) return cudaErrorInvalidValue;
    auto const device = static_cast<int>(reinterpret_cast<std::uintptr_t>(pool)) - 1;
    auto result = ~std::uint64_t{0};
    if (attribute == cudaMemPoolAttrReservedMemCurrent || attribute == cudaMemPoolAttrUsedMemCurrent)
      result = static_cast<std::uint64_t>(bytes_in_use(device));
    if (attribute == cudaMemPoolAttrReservedMemHigh || attribute == cudaMemPoolAttrUsedMemHigh)
      result = static_cast<std::uint64_t>(most_bytes_in_use(device));
    std::memcpy(value, &result, sizeof(result));
    return cudaSuccess;
  });
}
cudaError_t cudaMemPoolTrimTo(cudaMemPool_t pool, std::size_t) {
  return call("cudaMemPoolTrimTo", [&] { return pool == nullptr ? cudaErrorInvalidValue : cudaSuccess; });
}

cudaError_t cudaPointerGetAttributes(cudaPointerAttributes* attributes, void const* memory) {
  return call("cudaPointerGetAttributes", [&] {
    auto const a = reinterpret_cast<address>(memory);
    auto* const pointer = const_cast<void*>(memory);
    if (is_device(a))
      *attributes = {cudaMemoryTypeDevice, device_at(a), pointer, nullptr};
    else if (is_pinned(a))
      *attributes = {cudaMemoryTypeHost, device_of_thread, pointer, pointer};
    else
      *attributes = {cudaMemoryTypeUnregistered, -2, nullptr, pointer};
    return cudaSuccess;
  });
}

cudaError_t cudaMemcpy(void* to, void const* from, std::size_t bytes, cudaMemcpyKind kind) {
  return locked_call("cudaMemcpy", [&](guard& lock) {
    return copy(to, from, {bytes, bytes, bytes, 1}, kind, nullptr, true, lock);
  });
}
cudaError_t cudaMemcpyAsync(void* to, void const* from, std::size_t bytes, cudaMemcpyKind kind,
                            cudaStream_t stream) {
  return locked_call("cudaMemcpyAsync", [&](guard& lock) {
    return copy(to, from, {bytes, bytes, bytes, 1}, kind, stream, false, lock);
  });
}
cudaError_t cudaMemcpy2D(void* to, std::size_t to_pitch, void const* from, std::size_t from_pitch,
                         std::size_t width, std::size_t height, cudaMemcpyKind kind) {
  return locked_call("cudaMemcpy2D", [&](guard& lock) {
    return copy(to, from, {to_pitch, from_pitch, width, height}, kind, nullptr, true, lock);
  });
}
cudaError_t cudaMemcpy2DAsync(void* to, std::size_t to_pitch, void const* from, std::size_t from_pitch,
                              std::size_t width, std::size_t height, cudaMemcpyKind kind,
                              cudaStream_t stream) {
  return locked_call("cudaMemcpy2DAsync", [&](guard& lock) {
    return copy(to, from, {to_pitch, from_pitch, width, height}, kind, stream, false, lock);
  });
}
cudaError_t cudaMemset(void* to, int value, std::size_t bytes) {
  return locked_call("cudaMemset", [&](guard&) { return set(to, value, bytes, nullptr); });
}
cudaError_t cudaMemsetAsync(void* to, int value, std::size_t bytes, cudaStream_t stream) {
  return locked_call("cudaMemsetAsync", [&](guard&) { return set(to, value, bytes, stream); });
}

// ---- streams

cudaError_t cudaStreamCreateWithPriority(cudaStream_t* stream, unsigned flags, int priority) {
  return locked_call("cudaStreamCreateWithPriority", [&](guard&) {
    if (stream == nullptr || flags > 1) return cudaErrorInvalidValue;
    auto const made = std::make_shared<CUstream_st>();
    made->number = ++all().numbers;
    made->device = device_of_thread;
    made->flags = flags;
    made->priority = std::clamp(priority, -5, 0);
    all().streams.push_back(made);
    *stream = made.get();
    return stuck(device_of_thread);
  });
}
cudaError_t cudaStreamCreateWithFlags(cudaStream_t* stream, unsigned flags) {
  return cudaStreamCreateWithPriority(stream, flags, 0);
}
cudaError_t cudaStreamCreate(cudaStream_t* stream) {
  return cudaStreamCreateWithPriority(stream, 0, 0);
}

cudaError_t cudaStreamGetPriority(cudaStream_t handle, int* priority) {
  return locked_call("cudaStreamGetPriority", [&](guard&) {
    auto* const stream = resolve(handle);
    return stream == nullptr ? cudaErrorInvalidResourceHandle : (*priority = stream->priority, cudaSuccess);
  });
}
cudaError_t cudaStreamGetFlags(cudaStream_t handle, unsigned* flags) {
  return locked_call("cudaStreamGetFlags", [&](guard&) {
    auto* const stream = resolve(handle);
    return stream == nullptr ? cudaErrorInvalidResourceHandle : (*flags = stream->flags, cudaSuccess);
  });
}
cudaError_t cudaStreamGetDevice(cudaStream_t handle, int* device) {
  return locked_call("cudaStreamGetDevice", [&](guard&) {
    auto* const stream = resolve(handle);
    return stream == nullptr ? cudaErrorInvalidResourceHandle : (*device = stream->device, cudaSuccess);
  });
}

cudaError_t cudaStreamDestroy(cudaStream_t handle) {
  return locked_call("cudaStreamDestroy", [&](guard& lock) {
    auto* const stream = resolve(handle);
    if (stream == nullptr || is_default(*stream)) return cudaErrorInvalidResourceHandle;
    if (auto const error = may_wait(*stream); error != cudaSuccess) return error;
    work_off(*stream, stream->issued, lock);
    auto& streams = all().streams;
    streams.erase(
        std::find_if(streams.begin(), streams.end(), [&](auto const& s) { return s.get() == stream; }));
    return cudaSuccess;
  });
}
cudaError_t cudaStreamSynchronize(cudaStream_t handle) {
  return call("cudaStreamSynchronize", [&] { return drain(handle); });
}
cudaError_t cudaStreamQuery(cudaStream_t handle) {
  return locked_call("cudaStreamQuery", [&](guard& lock) {
    auto* const stream = resolve(handle);
    if (stream == nullptr) return cudaErrorInvalidResourceHandle;
    if (auto const error = may_wait(*stream); error != cudaSuccess) return error;
    // One who asks again and again gets there.
    if (stream->done < stream->issued) {
      (void)move(*stream, lock);
      return cudaErrorNotReady;
    }
    return stuck(stream->device);
  });
}
cudaError_t cudaLaunchHostFunc(cudaStream_t handle, cudaHostFn_t function, void* argument) {
  return locked_call("cudaLaunchHostFunc", [&](guard&) {
    auto* const stream = resolve(handle);
    if (stream == nullptr) return cudaErrorInvalidResourceHandle;
    if (function == nullptr) return cudaErrorInvalidValue;
    operation made{"host function", {}, {}, {}, false};
    made.work = [=] {
      function(argument);
      return true;
    };
    return put(*stream, static_cast<operation&&>(made));
  });
}

// ---- events

cudaError_t cudaEventCreateWithFlags(cudaEvent_t* event, unsigned flags) {
  return call("cudaEventCreateWithFlags", [&] {
    if (event == nullptr) return cudaErrorInvalidValue;
    *event = new CUevent_st;
    (*event)->flags = flags;
    (*event)->device = device_of_thread;
    return stuck(device_of_thread);
  });
}
cudaError_t cudaEventCreate(cudaEvent_t* event) {
  return cudaEventCreateWithFlags(event, cudaEventDefault);
}
cudaError_t cudaEventDestroy(cudaEvent_t event) {
  return call("cudaEventDestroy", [&] {
    if (event == nullptr) return cudaErrorInvalidResourceHandle;
    delete event;
    return cudaSuccess;
  });
}
cudaError_t cudaEventRecord(cudaEvent_t event, cudaStream_t handle) {
  return locked_call("cudaEventRecord", [&](guard&) {
    auto* const stream = resolve(handle);
    if (event == nullptr || stream == nullptr || event->device != stream->device)
      return cudaErrorInvalidResourceHandle;
    if (stream->capturing != nullptr) {
      if (stream->capturing->invalid) return cudaErrorStreamCaptureInvalidated;
      event->captured = stream->capturing;
      event->captured_after = stream->capturing->issued[stream];
      event->stream = stream->shared_from_this();
      return cudaSuccess;
    }
    auto const time = std::make_shared<std::chrono::steady_clock::time_point>();
    operation made{"event", {}, {}, {}, true};
    made.work = [time] {
      *time = std::chrono::steady_clock::now();
      return true;
    };
    auto const error = put(*stream, static_cast<operation&&>(made));
    if (error != cudaSuccess) return error;
    event->captured.reset();
    event->time = time;
    event->stream = stream->shared_from_this();
    event->after = stream->issued;
    return cudaSuccess;
  });
}
cudaError_t cudaStreamWaitEvent(cudaStream_t handle, cudaEvent_t event, unsigned) {
  return locked_call("cudaStreamWaitEvent", [&](guard&) {
    auto* const stream = resolve(handle);
    if (event == nullptr || stream == nullptr) return cudaErrorInvalidResourceHandle;
    if (event->stream == nullptr) return cudaSuccess;
    auto const captured = event->captured.lock();
    if (captured != nullptr) {
      if (stream->capturing != nullptr && stream->capturing != captured) {
        stream->capturing->invalid = captured->invalid = true;
        return cudaErrorStreamCaptureMerge;
      }
      if (captured->invalid) return cudaErrorStreamCaptureInvalidated;
      stream->capturing = captured;
      auto& joined = captured->joined[event->stream.get()];
      joined = std::max(joined, event->captured_after);
      if (stream != captured->origin && event->stream.get() != stream)
        captured->issued.try_emplace(stream, 0);
      return cudaSuccess;
    }
    if (stream->capturing != nullptr) {
      stream->capturing->invalid = true;
      return cudaErrorStreamCaptureIsolation;
    }
    operation made{"wait for an event", [] { return true; }, {}, {{event->stream, event->after}}, true};
    return put(*stream, static_cast<operation&&>(made));
  });
}
cudaError_t cudaEventQuery(cudaEvent_t event) {
  return locked_call("cudaEventQuery", [&](guard& lock) {
    if (event == nullptr) return cudaErrorInvalidResourceHandle;
    if (!event->captured.expired()) return cudaErrorCapturedEvent;
    if (event->stream == nullptr) return cudaSuccess;
    if (event->stream->done < event->after) {
      (void)move(*event->stream, lock);
      return cudaErrorNotReady;
    }
    return stuck(event->device);
  });
}
cudaError_t cudaEventSynchronize(cudaEvent_t event) {
  return locked_call("cudaEventSynchronize", [&](guard& lock) {
    if (event == nullptr) return cudaErrorInvalidResourceHandle;
    if (!event->captured.expired()) return cudaErrorCapturedEvent;
    if (event->stream == nullptr) return cudaSuccess;
    work_off(*event->stream, event->after, lock);
    return stuck(event->device);
  });
}
cudaError_t cudaEventElapsedTime(float* milliseconds, cudaEvent_t start, cudaEvent_t end) {
  return locked_call("cudaEventElapsedTime", [&](guard&) {
    if (start == nullptr || end == nullptr || start->stream == nullptr || end->stream == nullptr)
      return cudaErrorInvalidResourceHandle;
    if (((start->flags | end->flags) & cudaEventDisableTiming) != 0) return cudaErrorInvalidResourceHandle;
    if (start->stream->done < start->after || end->stream->done < end->after) return cudaErrorNotReady;
    *milliseconds = std::chrono::duration<float, std::milli>(*end->time - *start->time).count();
    return cudaSuccess;
  });
}

// ---- graphs

cudaError_t cudaStreamBeginCapture(cudaStream_t handle, cudaStreamCaptureMode mode) {
  return locked_call("cudaStreamBeginCapture", [&](guard&) {
    auto* const stream = resolve(handle);
    if (stream == nullptr) return cudaErrorInvalidResourceHandle;
    if (is_default(*stream)) return cudaErrorStreamCaptureUnsupported;
    if (stream->capturing != nullptr) return cudaErrorIllegalState;
    if (auto const error = stuck(stream->device); error != cudaSuccess) return error;
    auto const made = std::make_shared<capture>();
    made->mode = mode;
    made->origin = stream;
    made->thread = this_thread();
    stream->capturing = made;
    all().captures.push_back(made);
    return cudaSuccess;
  });
}
cudaError_t cudaStreamEndCapture(cudaStream_t handle, cudaGraph_t* graph) {
  return locked_call("cudaStreamEndCapture", [&](guard&) {
    auto* const stream = resolve(handle);
    if (stream == nullptr || graph == nullptr) return cudaErrorInvalidResourceHandle;
    *graph = nullptr;
    auto const c = stream->capturing;
    if (c == nullptr) return cudaErrorIllegalState;
    if (c->origin != stream) return cudaErrorStreamCaptureUnmatched;
    if (c->mode != cudaStreamCaptureModeRelaxed && c->thread != this_thread())
      return cudaErrorStreamCaptureWrongThread;
    bool unjoined = false;
    for (auto const& [other, issued] : c->issued)
      if (other != stream && c->joined[other] < issued) unjoined = true;
    for (auto const& s : all().streams)
      if (s->capturing == c) s->capturing = nullptr;
    auto& captures = all().captures;
    captures.erase(std::find(captures.begin(), captures.end(), c));
    if (c->invalid) return cudaErrorStreamCaptureInvalidated;
    if (unjoined) return cudaErrorStreamCaptureUnjoined;
    *graph = new CUgraph_st{
        std::make_shared<std::vector<operation>>(static_cast<std::vector<operation>&&>(c->operations))};
    return cudaSuccess;
  });
}
cudaError_t cudaStreamIsCapturing(cudaStream_t handle, cudaStreamCaptureStatus* status) {
  return locked_call("cudaStreamIsCapturing", [&](guard&) {
    auto* const stream = resolve(handle);
    if (stream == nullptr) return cudaErrorInvalidResourceHandle;
    *status = stream->capturing == nullptr ? cudaStreamCaptureStatusNone
              : stream->capturing->invalid ? cudaStreamCaptureStatusInvalidated
                                           : cudaStreamCaptureStatusActive;
    return cudaSuccess;
  });
}
cudaError_t cudaThreadExchangeStreamCaptureMode(cudaStreamCaptureMode*) {
  return call("cudaThreadExchangeStreamCaptureMode", [&] { return cudaErrorNotSupported; });
}
cudaError_t cudaGraphInstantiate(cudaGraphExec_t* executable, cudaGraph_t graph, unsigned long long) {
  return call("cudaGraphInstantiate", [&] {
    if (executable == nullptr || graph == nullptr) return cudaErrorInvalidValue;
    *executable = new CUgraphExec_st{graph->operations};
    return cudaSuccess;
  });
}
cudaError_t cudaGraphLaunch(cudaGraphExec_t executable, cudaStream_t handle) {
  return locked_call("cudaGraphLaunch", [&](guard&) {
    auto* const stream = resolve(handle);
    if (executable == nullptr) return cudaErrorInvalidValue;
    if (stream == nullptr) return cudaErrorInvalidResourceHandle;
    return put(*stream, replay(executable->operations));
  });
}
cudaError_t cudaGraphUpload(cudaGraphExec_t executable, cudaStream_t) {
  return call("cudaGraphUpload", [&] { return executable == nullptr ? cudaErrorInvalidValue : cudaSuccess; });
}
cudaError_t cudaGraphGetNodes(cudaGraph_t graph, cudaGraphNode_t* nodes, std::size_t* count) {
  return call("cudaGraphGetNodes", [&] {
    if (graph == nullptr || count == nullptr) return cudaErrorInvalidValue;
    if (nodes != nullptr) return cudaErrorNotSupported;
    *count = graph->operations->size();
    return cudaSuccess;
  });
}
cudaError_t cudaGraphDestroy(cudaGraph_t graph) {
  return call("cudaGraphDestroy",
              [&] { return graph == nullptr ? cudaErrorInvalidValue : (delete graph, cudaSuccess); });
}
cudaError_t cudaGraphExecDestroy(cudaGraphExec_t executable) {
  return call("cudaGraphExecDestroy", [&] {
    return executable == nullptr ? cudaErrorInvalidValue : (delete executable, cudaSuccess);
  });
}
cudaError_t cudaProfilerStart() {
  return call("cudaProfilerStart", [] { return cudaSuccess; });
}
cudaError_t cudaProfilerStop() {
  return call("cudaProfilerStop", [] { return cudaSuccess; });
}
}

// ---- ranges of the profiler

#include <nvtx3/nvToolsExt.h>

static thread_local int ranges = 0;
extern "C" int nvtxRangePushA(char const*) {
  return ranges++;
}
extern "C" int nvtxRangePop() {
  return ranges == 0 ? -1 : --ranges;
}
extern "C" int nvtxRangePushEx(nvtxEventAttributes_t const*) {
  return ranges++;
}
extern "C" void nvtxMarkA(char const*) {}
int cuda_emulation::open_ranges() noexcept {
  return ranges;
}
