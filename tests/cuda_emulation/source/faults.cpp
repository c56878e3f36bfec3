/// Faults and errors: what was found, where in the source it was, and what a program that ignored them ends
/// with.
#include "machine.hpp"

#include <algorithm>
#include <mutex>

#include <cxxabi.h>
#include <elf.h>
#include <fcntl.h>
#include <link.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

namespace cuda_emulation {

char const* name_of(fault_kind kind) noexcept {
  switch (kind) {
  case fault_kind::out_of_bounds:
    return "out of bounds";
  case fault_kind::use_after_free:
    return "use after free";
  case fault_kind::unwritten_read:
    return "read of unwritten memory";
  case fault_kind::race:
    return "race";
  case fault_kind::misaligned:
    return "misaligned access";
  case fault_kind::barrier:
    return "divergent barrier";
  case fault_kind::warp_mask:
    return "wrong warp mask";
  case fault_kind::hang:
    return "hang";
  case fault_kind::host_pointer:
    return "host memory in a kernel";
  case fault_kind::device_pointer:
    return "device memory in host code";
  case fault_kind::synchronisation:
    return "missing synchronisation";
  case fault_kind::trap:
    return "trap";
  }
  return "?";
}

namespace {

struct unchecked {
  std::string name;
  int code;
};

struct all_faults {
  std::mutex mutex;
  std::vector<fault> found;
  cudaError_t stuck[most_devices] = {};
  bool print = true;
};
all_faults& all() {
  static auto* const made = new all_faults;
  return *made;
}

struct of_thread {
  std::vector<unchecked> errors;
  cudaError_t last = cudaSuccess;
  std::int64_t calls = 0, fail_at = -1;
  cudaError_t fail_with = cudaSuccess;
};
/// Never freed: static objects may still call when the thread has ended.
of_thread& mine_of_this_thread() {
  static thread_local of_thread* made = nullptr;
  if (made == nullptr) made = new of_thread;
  return *made;
}
#define mine mine_of_this_thread()

std::mutex left_mutex;
/// Errors of threads that have ended.
std::vector<unchecked>& left_over() {
  static auto* const made = new std::vector<unchecked>;
  return *made;
}
struct hand_over {
  ~hand_over() {
    std::lock_guard const lock(left_mutex);
    for (auto& e : mine.errors) left_over().push_back(e);
    mine.errors.clear();
  }
};
thread_local hand_over at_the_end_of_the_thread;

[[gnu::destructor(101)]] void judge() {
  auto& a = all();
  auto const errors = take_unchecked_errors();
  for (auto const& name : errors)
    std::fprintf(stderr, "cuda_emulation: %s returned an error that nobody looked at\n", name.c_str());
  if (!a.found.empty())
    std::fprintf(stderr, "cuda_emulation: %zu faults that nobody took, the first: %s: %s\n", a.found.size(),
                 name_of(a.found.front().kind), a.found.front().message.c_str());
  if (errors.empty() && a.found.empty()) return;
  std::fflush(nullptr);
  _exit(86);
}

} // namespace

void record_fault(fault_kind kind, int, std::string message) {
  auto& a = all();
  std::lock_guard const lock(a.mutex);
  if (a.print) std::fprintf(stderr, "cuda_emulation: %s: %s\n", name_of(kind), message.c_str());
  a.found.push_back({kind, static_cast<std::string&&>(message)});
}
std::vector<fault> faults() {
  std::lock_guard const lock(all().mutex);
  return all().found;
}
std::vector<fault> take_faults() {
  std::lock_guard const lock(all().mutex);
  std::vector<fault> taken;
  taken.swap(all().found);
  for (auto& error : all().stuck) error = cudaSuccess;
  return taken;
}
void print_faults(bool print) noexcept {
  all().print = print;
}

cudaError_t stuck(int device) {
  std::lock_guard const lock(all().mutex);
  return device < 0 || device >= most_devices ? cudaSuccess : all().stuck[device];
}
void set_stuck(int device, cudaError_t error) {
  std::lock_guard const lock(all().mutex);
  if (device >= 0 && device < most_devices && all().stuck[device] == cudaSuccess) all().stuck[device] = error;
}

// ---- calls and their errors

std::int64_t calls() noexcept {
  return mine.calls;
}
void fail_call(std::int64_t after, cudaError_t error) noexcept {
  mine.fail_at = after < 0 ? -1 : mine.calls + after;
  mine.fail_with = error;
}

cudaError_t begin_call(char const*) {
  auto const number = mine.calls++;
  if (number != mine.fail_at) return cudaSuccess;
  mine.fail_at = -1;
  return mine.fail_with;
}

void returned_error(char const* name, int code) {
  (void)&at_the_end_of_the_thread;
  mine.errors.push_back({name, code});
}

/// The latest error of this code has been looked at.
void checked_error(int code) {
  auto& errors = mine.errors;
  for (auto i = errors.size(); i-- > 0;)
    if (errors[i].code == code) {
      errors.erase(errors.begin() + static_cast<std::ptrdiff_t>(i));
      return;
    }
}

std::vector<std::string> take_unchecked_errors() {
  std::vector<std::string> names;
  for (auto const& e : mine.errors) names.push_back(e.name);
  mine.errors.clear();
  std::lock_guard const lock(left_mutex);
  for (auto const& e : left_over()) names.push_back(e.name);
  left_over().clear();
  return names;
}

/// At the end of every function of CUDA that returns an error.
cudaError_t finish_call(char const* name, cudaError_t error) {
  if (error == cudaSuccess) return error;
  mine.last = error;
  // An answer rather than an error.
  if (error == cudaErrorNotReady || error == cudaErrorPeerAccessAlreadyEnabled) return error;
  // A device that is stuck says so again at each call; once is enough to look.
  for (int d = 0; d < most_devices; ++d)
    if (stuck(d) == error && !faults().empty()) return error;
  returned_error(name, error);
  return error;
}

} // namespace cuda_emulation

extern "C" {

cudaError_t cudaGetLastError() {
  using namespace cuda_emulation;
  auto const last = mine.last;
  auto const error = last != cudaSuccess ? last : stuck(current_device());
  mine.last = cudaSuccess;
  checked_error(error);
  return error;
}
cudaError_t cudaPeekAtLastError() {
  using namespace cuda_emulation;
  return mine.last != cudaSuccess ? mine.last : stuck(current_device());
}

#define ERRORS(X)                                                                                            \
  X(cudaSuccess, "no error")                                                                                 \
  X(cudaErrorInvalidValue, "invalid argument")                                                               \
  X(cudaErrorMemoryAllocation, "out of memory")                                                              \
  X(cudaErrorInitializationError, "initialization error")                                                    \
  X(cudaErrorInvalidConfiguration, "invalid configuration argument")                                         \
  X(cudaErrorInvalidSymbol, "invalid device symbol")                                                         \
  X(cudaErrorInvalidDevicePointer, "invalid device pointer")                                                 \
  X(cudaErrorInvalidMemcpyDirection, "invalid copy direction for memcpy")                                    \
  X(cudaErrorInsufficientDriver, "CUDA driver version is insufficient for CUDA runtime version")             \
  X(cudaErrorInvalidDeviceFunction, "invalid device function")                                               \
  X(cudaErrorNoDevice, "no CUDA-capable device is detected")                                                 \
  X(cudaErrorInvalidDevice, "invalid device ordinal")                                                        \
  X(cudaErrorNoKernelImageForDevice, "no kernel image is available for execution on the device")             \
  X(cudaErrorPeerAccessUnsupported, "peer access is not supported between these two devices")                \
  X(cudaErrorInvalidResourceHandle, "invalid resource handle")                                               \
  X(cudaErrorIllegalState, "the operation cannot be performed in the present state")                         \
  X(cudaErrorNotReady, "device not ready")                                                                   \
  X(cudaErrorIllegalAddress, "an illegal memory access was encountered")                                     \
  X(cudaErrorLaunchOutOfResources, "too many resources requested for launch")                                \
  X(cudaErrorLaunchTimeout, "the launch timed out and was terminated")                                       \
  X(cudaErrorPeerAccessAlreadyEnabled, "peer access is already enabled")                                     \
  X(cudaErrorPeerAccessNotEnabled, "peer access has not been enabled")                                       \
  X(cudaErrorAssert, "device-side assert triggered")                                                         \
  X(cudaErrorMisalignedAddress, "misaligned address")                                                        \
  X(cudaErrorInvalidAddressSpace, "operation not supported on global/shared address space")                  \
  X(cudaErrorLaunchFailure, "unspecified launch failure")                                                    \
  X(cudaErrorNotPermitted, "operation not permitted")                                                        \
  X(cudaErrorNotSupported, "operation not supported")                                                        \
  X(cudaErrorStreamCaptureUnsupported, "operation not permitted when stream is capturing")                   \
  X(cudaErrorStreamCaptureInvalidated, "operation failed due to a previous error during capture")            \
  X(cudaErrorStreamCaptureMerge, "operation would result in a merge of separate capture sequences")          \
  X(cudaErrorStreamCaptureUnmatched, "capture was not ended in the same stream as it began")                 \
  X(cudaErrorStreamCaptureUnjoined, "capturing stream has unjoined work")                                    \
  X(cudaErrorStreamCaptureIsolation, "dependency created on uncaptured work in another stream")              \
  X(cudaErrorStreamCaptureImplicit, "operation would make the legacy stream depend on a capturing stream")   \
  X(cudaErrorCapturedEvent, "operation not permitted on an event last recorded in a capturing stream")       \
  X(cudaErrorStreamCaptureWrongThread, "attempt to end a capture from a thread that did not begin it")       \
  X(cudaErrorTimeout, "wait operation timed out")                                                            \
  X(cudaErrorUnknown, "unknown error")

char const* cudaGetErrorName(cudaError_t error) {
  cuda_emulation::checked_error(error);
#define NAME(e, text)                                                                                        \
  if (error == e) return #e;
  ERRORS(NAME)
  return "unrecognized error code";
}
char const* cudaGetErrorString(cudaError_t error) {
  cuda_emulation::checked_error(error);
#define TEXT(e, text)                                                                                        \
  if (error == e) return text;
  ERRORS(TEXT)
  return "unrecognized error code";
}
}

namespace cuda_emulation {

// ---- names of addresses

namespace {

struct program {
  address base = 0; // what was added to the addresses in the file
  address thread_locals = 0;
  std::size_t thread_local_bytes = 0;
};

program find_program() {
  program found;
  dl_iterate_phdr(
      [](dl_phdr_info* info, std::size_t, void* data) {
        auto& p = *static_cast<program*>(data);
        p.base = info->dlpi_addr;
        for (int i = 0; i < info->dlpi_phnum; ++i)
          if (info->dlpi_phdr[i].p_type == PT_TLS) {
            p.thread_locals = reinterpret_cast<address>(info->dlpi_tls_data);
            p.thread_local_bytes = info->dlpi_phdr[i].p_memsz;
          }
        return 1; // the first is the program itself
      },
      &found);
  return found;
}

std::string demangle(char const* name) {
  int status = 0;
  auto* const text = abi::__cxa_demangle(name, nullptr, nullptr, &status);
  std::string result = text == nullptr ? name : text;
  std::free(text);
  for (std::string_view const noise : {"tessera::v0_1::", "(anonymous namespace)::"})
    for (auto at = result.find(noise); at != std::string::npos; at = result.find(noise, at))
      result.erase(at, noise.size());
  return result;
}

/// Calls f(symbol, name) for the program's symbols.
template <class F>
void for_symbols(F f) {
  auto const file = open("/proc/self/exe", O_RDONLY | O_CLOEXEC);
  struct stat status {};
  if (file < 0 || fstat(file, &status) != 0) return;
  auto const bytes = static_cast<std::size_t>(status.st_size);
  auto* const data = static_cast<char const*>(mmap(nullptr, bytes, PROT_READ, MAP_PRIVATE, file, 0));
  close(file);
  if (data == MAP_FAILED) return;
  auto const& header = *reinterpret_cast<Elf64_Ehdr const*>(data);
  auto const* const sections = reinterpret_cast<Elf64_Shdr const*>(data + header.e_shoff);
  for (int s = 0; s < header.e_shnum; ++s) {
    if (sections[s].sh_type != SHT_SYMTAB) continue;
    auto const* const symbols = reinterpret_cast<Elf64_Sym const*>(data + sections[s].sh_offset);
    auto const* const names = data + sections[sections[s].sh_link].sh_offset;
    for (std::size_t i = 0; i < sections[s].sh_size / sizeof(Elf64_Sym); ++i)
      f(symbols[i], names + symbols[i].st_name);
  }
  munmap(const_cast<char*>(data), bytes);
}

} // namespace

void find_thread_locals(address& begin, std::size_t& bytes) {
  auto const found = find_program();
  begin = found.thread_locals;
  bytes = found.thread_local_bytes;
}

std::string describe_shared_variable(address offset) {
  std::string text = "byte " + std::to_string(offset) + " of static shared memory";
  for_symbols([&](Elf64_Sym const& symbol, char const* name) {
    if (ELF64_ST_TYPE(symbol.st_info) != STT_TLS || offset < symbol.st_value ||
        offset >= symbol.st_value + std::max<std::size_t>(symbol.st_size, 1))
      return;
    text = "byte " + std::to_string(offset - symbol.st_value) + " of shared variable " + demangle(name) +
           " (" + std::to_string(symbol.st_size) + " bytes)";
  });
  return text;
}

std::string name_of_function(void const* function) {
  std::string text = "?";
  auto const a = reinterpret_cast<address>(function) - find_program().base;
  for_symbols([&](Elf64_Sym const& symbol, char const* name) {
    if (ELF64_ST_TYPE(symbol.st_info) == STT_FUNC && symbol.st_value == a) text = demangle(name);
  });
  return text;
}

std::string describe_code(void const* at) {
  // The call's return address is the next instruction; one byte before it is the call.
  auto const a = reinterpret_cast<address>(at) - 1 - find_program().base;
  char command[128];
  std::snprintf(command, sizeof(command), "addr2line -f -C -i -p -e /proc/%d/exe 0x%llx 2>/dev/null",
                static_cast<int>(getpid()), static_cast<unsigned long long>(a));
  std::string text;
  if (auto* const pipe = popen(command, "r")) {
    char line[2048];
    while (std::fgets(line, sizeof(line), pipe) != nullptr) text += line;
    pclose(pipe);
  }
  while (!text.empty() && text.back() == '\n') text.pop_back();
  return "at " + (text.empty() ? std::string("an unknown place") : text);
}

} // namespace cuda_emulation
