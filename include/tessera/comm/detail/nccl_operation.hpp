/// A call of an nccl communicator under way, and what the checked level does with device memory.
#ifndef TESSERA_COMM_DETAIL_NCCL_OPERATION_HPP
#define TESSERA_COMM_DETAIL_NCCL_OPERATION_HPP

#if defined(TESSERA_WITH_NCCL)

#include <tessera/comm/detail/nccl_link.hpp>

namespace tessera::inline TESSERA_ABI::comm::detail {

/// What the combining kernel runs in, and where it notes that a sum of integers overflowed (null: nowhere).
struct device_combine_space {
  exec::cuda& lane;
  int* overflow;
};
/// `combine` on a device (comm/cuda/nccl.cuh): the same arithmetic. True: overflow is noted, not returned.
template <reducible_scalar T>
bool combine_on_device(void* space, combine_step const& step);

struct nccl_operation : nccl_call {
  /// Of what shares one piece of memory.
  static constexpr index_t alignment = 16;
  static constexpr index_t rounded(index_t bytes) noexcept {
    return (bytes + alignment - 1) / alignment * alignment;
  }

  bool finished = false;
  bool waiting = false;   // a message that has not gone out
  bool on_device = false; // as its caller gave it
  bool adds_integers = false;
  int unwinding = 0; // exceptions in flight when it was made
  std::exception_ptr error;
  exec::event ended;

  buffer<exec::cuda_memory> pieces; // what the ranks sent, to be combined; a flag

  buffer<exec::cuda_memory> device_stage; // for messages in host memory
  buffer<exec::pinned_memory> host_stage; // the same; the flag first
  void* host_out = nullptr;               // where the output goes
  index_t host_out_bytes = 0, host_out_offset = 0;

  loan lent; // at the checked level
  buffer<exec::cuda_memory> device_copies;
  buffer<> host_copies;
  buffer<exec::cuda_memory> device_headers; // of messages: mine, my peer's
  buffer<exec::pinned_memory> host_headers;

  nccl_operation* next = nullptr;

  void reset(call const& c, std::uint64_t of_group, bool is_blocking) noexcept {
    static_cast<nccl_call&>(*this) = {};
    request = c;
    group = of_group;
    blocking = is_blocking;
    finished = waiting = adds_integers = false;
    on_device = c.on_device;
    unwinding = std::uncaught_exceptions();
    error = nullptr;
    host_out = nullptr;
    lent = {};
  }
  /// A checked message that has come: is it the one that was asked for? The tag travels as its number.
  void compare_headers() const {
    signature theirs;
    std::memcpy(&theirs, at(host_headers.data(), static_cast<index_t>(sizeof theirs)), sizeof theirs);
    auto const tag = theirs.sequence;
    theirs.sequence = 0;
    if (theirs.what == collective::send && tag == request.tag && theirs.type == sign.type &&
        theirs.count == sign.count)
      return;
    throw collective_mismatch("E-comm-013", request.where,
                              "the two sides of a message differ: ", text_of(sign), " with tag ", request.tag,
                              " meets ", text_of(theirs), " with tag ", tag);
  }
  int* overflow() const noexcept { return static_cast<int*>(host_stage.data()); }
};

/// Pinned memory grows, and is not given back before the end: that may wait for the device, which may wait
/// for other ranks.
class outgrown_memory {
public:
  void* room(buffer<exec::pinned_memory>& memory, index_t bytes, memory_account account, site where) {
    if (memory.bytes() < bytes) {
      auto const grown = 2 * memory.bytes();
      if (memory.bytes() > 0) kept_.push_back(static_cast<buffer<exec::pinned_memory>&&>(memory));
      memory = buffer<exec::pinned_memory>(grown < bytes ? bytes : grown, account, where);
    }
    return memory.data();
  }

private:
  std::vector<buffer<exec::pinned_memory>> kept_;
};

/// Lent device memory: filled in the compute stream, read by way of the host.
struct device_store {
  using memory = exec::cuda_memory;

  nccl_link& link;
  exec::event& arrived;
  void* host; // pinned, large enough
  nccl_operation& one;

  void copy(void* to, void const* from, index_t bytes) const {
    if (bytes > 0 && to != from)
      exec::cuda_check(cudaMemcpyAsync(to, from, static_cast<std::size_t>(bytes), cudaMemcpyDefault,
                                       link.compute.stream()),
                       "cudaMemcpyAsync", one.request.where);
  }
  void poison(void* to, index_t bytes) const {
    exec::cuda_check(
        cudaMemsetAsync(to, detail::poison, static_cast<std::size_t>(bytes), link.compute.stream()),
        "cudaMemsetAsync", one.request.where);
  }
  index_t first_written(void const* lent, index_t bytes) const {
    return bytes == 0 ? -1 : host_store::first_written(read(lent, bytes), bytes);
  }
  std::uint64_t digest(void const* data, index_t bytes) const {
    return host_store::digest(read(data, bytes), bytes);
  }

private:
  void const* read(void const* data, index_t bytes) const {
    copy(host, data, bytes);
    arrived.record(link.compute, one.request.where);
    link.wait(arrived, one);
    return host;
  }
};

} // namespace tessera::inline TESSERA_ABI::comm::detail

#endif

#endif
