/// A point in a stream's work: other streams wait for it without the host, the host asks whether it has
/// passed.
///
///     exec::event ready(ex);
///     ready.record(ex);                       // after what ex was given so far
///     ready.wait_in(other_stream);            // what other_stream is given from here on comes after it
///
/// Exists under TESSERA_WITH_CUDA.
#ifndef TESSERA_EXEC_EVENT_HPP
#define TESSERA_EXEC_EVENT_HPP

#if defined(TESSERA_WITH_CUDA)

#include <tessera/exec/cuda.hpp>

namespace tessera::inline TESSERA_ABI::exec {

struct event_options {
  /// Keep the time, for `milliseconds_since`. Costs a little at each record.
  bool timed = false;
};

/// Move-only. Belongs to the device of the space it was made for.
class event {
public:
  event() = default;
  template <cuda_space Ex>
  explicit event(Ex& ex, event_options options = {}, site where = site::here()) {
    detail::device_scope const on(ex.device(), where);
    cuda_check(cudaEventCreateWithFlags(&event_, options.timed ? cudaEventDefault : cudaEventDisableTiming),
               "cudaEventCreateWithFlags", where);
  }
  event(event&& other) noexcept : event_(other.event_) { other.event_ = nullptr; }
  event& operator=(event&& other) noexcept {
    auto* const held = event_;
    event_ = other.event_;
    other.event_ = held;
    return *this;
  }
  ~event() {
    if (event_ != nullptr) cuda_let_pass(cudaEventDestroy(event_));
  }

  void record(cudaStream_t stream, site where = site::here()) {
    cuda_check(cudaEventRecord(event_, stream), "cudaEventRecord", where);
  }
  template <cuda_space Ex>
  void record(Ex& ex, site where = site::here()) {
    record(ex.stream(), where);
  }

  /// The stream waits; the host does not. An event that was never recorded has passed.
  void wait_in(cudaStream_t stream, site where = site::here()) const {
    cuda_check(cudaStreamWaitEvent(stream, event_, 0), "cudaStreamWaitEvent", where);
  }
  template <cuda_space Ex>
  void wait_in(Ex& ex, site where = site::here()) const {
    wait_in(ex.stream(), where);
  }

  /// The host waits.
  void wait(site where = site::here()) const {
    cuda_check(cudaEventSynchronize(event_), "cudaEventSynchronize", where);
  }
  bool passed(site where = site::here()) const {
    auto const status = cudaEventQuery(event_);
    if (status == cudaErrorNotReady) {
      (void)cudaGetLastError();
      return false;
    }
    cuda_check(status, "cudaEventQuery", where);
    return true;
  }

  /// Device time between two passed events that were made with `timed`.
  double milliseconds_since(event const& start, site where = site::here()) const {
    float milliseconds = 0;
    cuda_check(cudaEventElapsedTime(&milliseconds, start.event_, event_), "cudaEventElapsedTime", where);
    return static_cast<double>(milliseconds);
  }

  cudaEvent_t native() const noexcept { return event_; }

private:
  cudaEvent_t event_ = nullptr;
};

} // namespace tessera::inline TESSERA_ABI::exec

#endif

#endif
