/// A stretch of work recorded once and started again as a whole: a training step of hundreds of kernels then
/// costs the host one call.
///
///     exec::graph step;
///     step.capture(ex, [&] { model.forward_backward(ex, ...); optimizer.step(ex, ...); });   // runs nothing
///     for (...) step.launch(ex);
///
/// What is captured must neither wait, nor take memory, nor copy from or to ordinary host memory: run the
/// step once beforehand, so that scratch memory and handles stand. Pointers and sizes are those of the
/// capture.
///
/// Exists under TESSERA_WITH_CUDA.
#ifndef TESSERA_EXEC_GRAPH_HPP
#define TESSERA_EXEC_GRAPH_HPP

#if defined(TESSERA_WITH_CUDA)

#include <tessera/exec/cuda.hpp>

namespace tessera::inline TESSERA_ABI::exec {

/// Move-only. Throws library_error (E-exec-101) where something cannot be captured, whatever `body` throws,
/// and config_error (E-exec-106) where there is nothing to launch.
class graph {
public:
  graph() = default;
  graph(graph&& other) noexcept : executable_(other.executable_) { other.executable_ = nullptr; }
  graph& operator=(graph&& other) noexcept {
    auto* const held = executable_;
    executable_ = other.executable_;
    other.executable_ = held;
    return *this;
  }
  ~graph() { clear(); }

  template <cuda_space Ex, std::invocable Body>
  void capture(Ex& ex, Body&& body, site where = site::here()) {
    clear();
    // Other threads (ranks) may go on with whatever they do.
    cuda_check(cudaStreamBeginCapture(ex.stream(), cudaStreamCaptureModeThreadLocal),
               "cudaStreamBeginCapture", where);
    cudaGraph_t recorded = nullptr;
    try {
      body();
    } catch (...) {
      cuda_let_pass(cudaStreamEndCapture(ex.stream(), &recorded));
      if (recorded != nullptr) cuda_let_pass(cudaGraphDestroy(recorded));
      throw;
    }
    cuda_check(cudaStreamEndCapture(ex.stream(), &recorded), "cudaStreamEndCapture", where);
    auto const status = cudaGraphInstantiate(&executable_, recorded, 0);
    cuda_let_pass(cudaGraphDestroy(recorded));
    cuda_check(status, "cudaGraphInstantiate", where);
  }

  bool captured() const noexcept { return executable_ != nullptr; }

  template <cuda_space Ex>
  void launch(Ex& ex, site where = site::here()) {
    if (executable_ == nullptr)
      throw config_error("E-exec-106", where, "a graph was launched before anything was captured");
    cuda_check(cudaGraphLaunch(executable_, ex.stream()), "cudaGraphLaunch", where);
  }

private:
  void clear() noexcept {
    if (executable_ != nullptr) cuda_let_pass(cudaGraphExecDestroy(executable_));
    executable_ = nullptr;
  }

  cudaGraphExec_t executable_ = nullptr;
};

} // namespace tessera::inline TESSERA_ABI::exec

#endif

#endif
