/// The CUDA execution space: one device, one stream, and the handles that operations keep between calls.
/// Operations are put into the stream and have not finished when they return; `synchronize` waits for them.
/// The calling thread's current device becomes this space's.
///
///     exec::cuda ex({.device = 0});
///     tensor<bf16, 2, exec::cuda::memory> x({rows, columns});
///     ops::gelu(ex, y.view(), x.view());
///     ex.synchronize();
///
/// Exists under TESSERA_WITH_CUDA.
#ifndef TESSERA_EXEC_CUDA_HPP
#define TESSERA_EXEC_CUDA_HPP

#if defined(TESSERA_WITH_CUDA)

#include <string>
#include <vector>

#include <nvtx3/nvToolsExt.h>

#include <tessera/exec/cuda_memory.hpp>
#include <tessera/exec/detail/handles.hpp>
#include <tessera/exec/space.hpp>

namespace tessera::inline TESSERA_ABI::exec {

struct cuda_backend {};

/// An execution space whose operations run on a CUDA device.
template <class Ex>
concept cuda_space = space<Ex> && std::same_as<typename Ex::backend, cuda_backend>;

struct cuda_options {
  int device = 0;
  /// What matrix products may use beside their operands.
  index_t workspace_bytes = index_t{32} << 20;
  /// A stream of the host application to work in, borrowed; none: one of this space's own.
  cudaStream_t stream = nullptr;
};

/// What kernels found wrong and the host learns later: looked at by each `cuda::synchronize`, which throws
/// what `look` throws.
class late_check {
public:
  virtual void look(site where) = 0;

protected:
  ~late_check() = default;
};

/// Used by one thread at a time. Not copyable: operations refer to its handles.
class cuda {
public:
  using memory = cuda_memory;
  using backend = cuda_backend;

  /// Throws config_error where the machine has no CUDA device (E-exec-102) or not that one (E-exec-103).
  explicit cuda(cuda_options options = {}, site where = site::here())
      : options_(options), stream_(options.stream), owns_stream_(options.stream == nullptr) {
    int devices = 0;
    auto const counted = cudaGetDeviceCount(&devices);
    if (counted != cudaSuccess || devices == 0) {
      (void)cudaGetLastError();
      throw config_error("E-exec-102", where, "this machine has no CUDA device that can be used (",
                         counted == cudaSuccess ? "none found" : cudaGetErrorString(counted),
                         "); compute on the host, or check the driver with nvidia-smi");
    }
    if (options.device < 0 || options.device >= devices)
      throw config_error("E-exec-103", where, "device ", options.device, " of ", devices,
                         " CUDA devices was asked for; they are numbered from 0");
    if (options.workspace_bytes < 0)
      throw config_error("E-exec-104", where, "a workspace of ", options.workspace_bytes,
                         " bytes was asked for");
    cuda_check(cudaSetDevice(options.device), "cudaSetDevice", where);
    cuda_check(cudaDeviceGetAttribute(&multiprocessors_, cudaDevAttrMultiProcessorCount, options.device),
               "cudaDeviceGetAttribute", where);
    // Memory that was given back stays with the pool: taking it again costs nothing.
    cudaMemPool_t pool = nullptr;
    cuda_check(cudaDeviceGetDefaultMemPool(&pool, options.device), "cudaDeviceGetDefaultMemPool", where);
    auto keep = ~std::uint64_t{0};
    cuda_check(cudaMemPoolSetAttribute(pool, cudaMemPoolAttrReleaseThreshold, &keep),
               "cudaMemPoolSetAttribute", where);
    if (owns_stream_)
      cuda_check(cudaStreamCreateWithFlags(&stream_, cudaStreamNonBlocking), "cudaStreamCreateWithFlags",
                 where);
  }
  cuda(cuda const&) = delete;
  cuda& operator=(cuda const&) = delete;
  /// Waits for what was started. Errors that nobody asked for until now are lost here.
  ~cuda() {
    cuda_let_pass(cudaSetDevice(options_.device));
    cuda_let_pass(cudaStreamSynchronize(stream_));
    handles_.clear();
    if (owns_stream_) cuda_let_pass(cudaStreamDestroy(stream_));
  }

  int device() const noexcept { return options_.device; }
  cudaStream_t stream() const noexcept { return stream_; }
  int multiprocessors() const noexcept { return multiprocessors_; }
  /// What computes, in words.
  std::string description() const {
    return tessera::text_of("CUDA device ", options_.device, ", ", multiprocessors_, " multiprocessors");
  }
  /// What decides how results are rounded: cuBLASLt chooses its kernels by the device.
  std::string arithmetic() const {
    return tessera::text_of("cuBLASLt products, multiprocessors ", multiprocessors_);
  }
  index_t workspace_bytes() const noexcept { return options_.workspace_bytes; }

  /// Waits until everything in the stream has finished, then reports what kernels found wrong.
  void synchronize(site where = site::here()) {
    cuda_check(cudaStreamSynchronize(stream_), "cudaStreamSynchronize", where);
    for (auto* check : checks_) check->look(where);
  }

  /// Adds a check to every later `synchronize`. It lives as long as this space: a part of one of its handles.
  void watch(late_check& check) { checks_.push_back(&check); }

  /// Whether work is being recorded into a CUDA graph (exec/graph.hpp) instead of being run.
  bool capturing(site where = site::here()) const {
    auto status = cudaStreamCaptureStatusNone;
    cuda_check(cudaStreamIsCapturing(stream_, &status), "cudaStreamIsCapturing", where);
    return status != cudaStreamCaptureStatusNone;
  }

  /// An object of type `Handle` that lives as long as this space, made at the first call: from the account
  /// that counts its memory, from this space (`Handle(exec::cuda&)`), or from nothing.
  template <class Handle>
  requires detail::handle_of<Handle, cuda> Handle& handle() {
    return handles_.template get<Handle>(*this, scratch_account());
  }

  /// Memory that operations keep in handles of this space, and the account that counts it.
  memory_meter const& scratch() const noexcept { return scratch_; }
  memory_account scratch_account() noexcept { return {&scratch_, memory_kind::other}; }

  /// Records a sentence for the program to show once.
  void note(std::string text) {
    for (auto const& known : notes_)
      if (known == text) return;
    notes_.push_back(static_cast<std::string&&>(text));
  }
  std::vector<std::string> const& notes() const noexcept { return notes_; }

  /// A named stretch of the program in the profiler's time line; use exec::range (exec/range.hpp).
  void enter_range(char const* name) noexcept { (void)nvtxRangePushA(name); }
  void leave_range() noexcept { (void)nvtxRangePop(); }

private:
  cuda_options options_;
  cudaStream_t stream_;
  bool owns_stream_;
  int multiprocessors_ = 0;
  memory_meter scratch_;
  detail::handles handles_;
  std::vector<late_check*> checks_;
  std::vector<std::string> notes_;
};

static_assert(cuda_space<cuda>);

/// CUDA devices of this machine; 0 also where there is no driver. Rank r of several usually takes
/// r % cuda_devices().
inline int cuda_devices() noexcept {
  int devices = 0;
  if (cudaGetDeviceCount(&devices) == cudaSuccess) return devices;
  (void)cudaGetLastError();
  return 0;
}

} // namespace tessera::inline TESSERA_ABI::exec

#endif

#endif
