/// An nccl communicator under a test that thinks in host memory. Either the calls take the test's spans as
/// they are, or each call's spans are brought to the device, at addresses that are not aligned, and what it
/// wrote comes back. Spans that overlap overlap there too.
#ifndef TESSERA_TESTS_COMM_CUDA_DEVICE_RANKS_HPP
#define TESSERA_TESTS_COMM_CUDA_DEVICE_RANKS_HPP

#include <memory>
#include <span>
#include <vector>

#include <tessera/comm/cuda/nccl.cuh>
#include <tessera/exec/copy_cuda.hpp>

namespace test {

using namespace tessera;

/// The device's side of what one call was lent.
class lent_memory {
public:
  virtual ~lent_memory() = default;
  virtual void bring() = 0;
  virtual void fetch() = 0;
};

template <class T>
class mirror final : public lent_memory {
public:
  using device = exec::cuda_memory;

  mirror(exec::cuda& ex, std::span<T> out, std::span<T const> in) : ex_(ex), out_(out), in_(in) {
    auto const *a = out.data(), *b = static_cast<T const*>(in.data());
    shared_ = !out.empty() && !in.empty() && a < b + in.size() && b < a + out.size();
    if (shared_) {
      begin_ = a < b ? a : b;
      auto const end = std::max(a + out.size(), b + in.size());
      memory_ = tensor<T, 1, device>({end - begin_ + 1});
    } else {
      memory_ = tensor<T, 1, device>({static_cast<index_t>(out.size()) + 1});
      input_ = tensor<T, 1, device>({static_cast<index_t>(in.size()) + 1});
    }
    bring();
  }

  device_span<T, device> out() {
    return memory_.span().subspan(shared_ ? offset(out_.data()) : 1, out_.size());
  }
  device_span<T const, device> in() {
    device_span<T const, device> const all = shared_ ? memory_.span() : input_.span();
    return all.subspan(shared_ ? offset(in_.data()) : 1, in_.size());
  }
  void bring() override {
    exec::copy(ex_, out(), std::span<T const>(out_));
    if (!in_.empty()) {
      auto const place = in();
      exec::copy(ex_, device_span<T, device>(const_cast<T*>(place.data()), place.size()), in_);
    }
  }
  void fetch() override { exec::copy(ex_, out_, out()); }

private:
  std::size_t offset(T const* place) const { return static_cast<std::size_t>(place - begin_) + 1; }

  exec::cuda& ex_;
  std::span<T> out_;
  std::span<T const> in_;
  T const* begin_ = nullptr;
  bool shared_ = false;
  tensor<T, 1, device> memory_, input_;
};

class device_ranks {
  template <class T>
  using input = std::type_identity_t<std::span<T const>>;
  using counts = std::span<index_t const>;
  using how = comm::reduce_options;

public:
  class request {
  public:
    request() = default;
    /// Without memory: the call was given the test's own spans.
    request(comm::nccl::request inner, std::shared_ptr<lent_memory> memory, bool checked)
        : inner_(std::move(inner)), memory_(std::move(memory)), checked_(checked) {
      if (checked_ && memory_) memory_->fetch(); // the caller sees poison
    }
    request(request&&) = default;
    request& operator=(request&&) = default;
    ~request() {
      if (memory_ && std::uncaught_exceptions() == 0) wait();
    }
    void wait() {
      if (!memory_) return inner_.wait();
      auto const memory = std::exchange(memory_, nullptr);
      if (checked_) memory->bring(); // what the caller did to it
      inner_.wait();
      memory->fetch();
    }
    bool test() {
      if (!inner_.test()) return false;
      if (memory_) std::exchange(memory_, nullptr)->fetch();
      return true;
    }

  private:
    comm::nccl::request inner_;
    std::shared_ptr<lent_memory> memory_;
    bool checked_ = false;
  };

  device_ranks(comm::nccl&& c, exec::cuda& ex, bool on_device)
      : c_(std::move(c)), ex_(&ex), on_device_(on_device) {}

  int rank() const { return c_.rank(); }
  int size() const { return c_.size(); }
  auto options() const { return c_.options(); }
  auto& meter() { return c_.meter(); }
  auto& memory() const { return c_.memory(); }
  template <class T>
  static index_t scratch_bytes(index_t n, int ranks) {
    return comm::nccl::scratch_bytes<T>(n, ranks);
  }
  void barrier() { c_.barrier(); }
  device_ranks split(int color, int key) { return {c_.split(color, key), *ex_, on_device_}; }

  template <class T>
  void broadcast(std::span<T> data, int root) {
    now<T>(data, {}, [&](auto out, auto) { c_.broadcast(out, root); });
  }
  template <class T>
  request start_broadcast(std::span<T> data, int root) {
    return later<T>(data, {}, [&](auto out, auto) { return c_.start_broadcast(out, root); });
  }
  template <class T>
  void reduce(std::span<T> out, input<T> in, int root, how h = {}) {
    now<T>(out, in, [&](auto o, auto i) { c_.reduce(o, i, root, h); });
  }
  template <class T>
  void all_reduce(std::span<T> data, how h = {}) {
    now<T>(data, {}, [&](auto out, auto) { c_.all_reduce(out, h); });
  }
  template <class T>
  void all_reduce(std::span<T> out, input<T> in, how h = {}) {
    now<T>(out, in, [&](auto o, auto i) { c_.all_reduce(o, i, h); });
  }
  template <comm::reducible_scalar T>
  T all_reduce(T value, how h = {}) {
    all_reduce(std::span<T>(&value, 1), h);
    return value;
  }
  template <class T>
  request start_all_reduce(std::span<T> data, how h = {}) {
    return later<T>(data, {}, [&](auto out, auto) { return c_.start_all_reduce(out, h); });
  }
  template <class T>
  request start_all_reduce(std::span<T> out, input<T> in, how h = {}) {
    return later<T>(out, in, [&](auto o, auto i) { return c_.start_all_reduce(o, i, h); });
  }
  template <class T>
  void reduce_scatter(std::span<T> out, input<T> in, how h = {}) {
    now<T>(out, in, [&](auto o, auto i) { c_.reduce_scatter(o, i, h); });
  }
  template <class T>
  void reduce_scatter_v(std::span<T> out, input<T> in, counts n, how h = {}) {
    now<T>(out, in, [&](auto o, auto i) { c_.reduce_scatter_v(o, i, n, h); });
  }
  template <class T>
  request start_reduce_scatter(std::span<T> out, input<T> in, how h = {}) {
    return later<T>(out, in, [&](auto o, auto i) { return c_.start_reduce_scatter(o, i, h); });
  }
  template <class T>
  request start_reduce_scatter_v(std::span<T> out, input<T> in, counts n, how h = {}) {
    return later<T>(out, in, [&](auto o, auto i) { return c_.start_reduce_scatter_v(o, i, n, h); });
  }
  template <class T>
  void all_gather(std::span<T> out, input<T> in) {
    now<T>(out, in, [&](auto o, auto i) { c_.all_gather(o, i); });
  }
  template <class T>
  void all_gather_v(std::span<T> out, input<T> in, counts n) {
    now<T>(out, in, [&](auto o, auto i) { c_.all_gather_v(o, i, n); });
  }
  template <class T>
  request start_all_gather(std::span<T> out, input<T> in) {
    return later<T>(out, in, [&](auto o, auto i) { return c_.start_all_gather(o, i); });
  }
  template <class T>
  request start_all_gather_v(std::span<T> out, input<T> in, counts n) {
    return later<T>(out, in, [&](auto o, auto i) { return c_.start_all_gather_v(o, i, n); });
  }
  template <class T>
  void gather(std::span<T> out, input<T> in, int root) {
    now<T>(out, in, [&](auto o, auto i) { c_.gather(o, i, root); });
  }
  template <class T>
  void gather_v(std::span<T> out, input<T> in, counts n, int root) {
    now<T>(out, in, [&](auto o, auto i) { c_.gather_v(o, i, n, root); });
  }
  template <class T>
  void scatter(std::span<T> out, input<T> in, int root) {
    now<T>(out, in, [&](auto o, auto i) { c_.scatter(o, i, root); });
  }
  template <class T>
  void scatter_v(std::span<T> out, input<T> in, counts n, int root) {
    now<T>(out, in, [&](auto o, auto i) { c_.scatter_v(o, i, n, root); });
  }
  template <class T>
  void all_to_all(std::span<T> out, input<T> in) {
    now<T>(out, in, [&](auto o, auto i) { c_.all_to_all(o, i); });
  }
  template <class T>
  void all_to_all_v(std::span<T> out, counts out_counts, input<T> in, counts in_counts) {
    now<T>(out, in, [&](auto o, auto i) { c_.all_to_all_v(o, out_counts, i, in_counts); });
  }
  template <class T>
  request start_all_to_all(std::span<T> out, input<T> in) {
    return later<T>(out, in, [&](auto o, auto i) { return c_.start_all_to_all(o, i); });
  }
  template <class T>
  request start_all_to_all_v(std::span<T> out, counts out_counts, input<T> in, counts in_counts) {
    return later<T>(out, in,
                    [&](auto o, auto i) { return c_.start_all_to_all_v(o, out_counts, i, in_counts); });
  }
  template <class S, class T = std::remove_const_t<S>>
  void send(std::span<S> data, int to, int tag) {
    now<T>({}, data, [&](auto, auto i) { c_.send(i, to, tag); });
  }
  template <class T>
  void receive(std::span<T> data, int from, int tag) {
    now<T>(data, {}, [&](auto o, auto) { c_.receive(o, from, tag); });
  }
  template <class S, class T = std::remove_const_t<S>>
  request start_send(std::span<S> data, int to, int tag) {
    return later<T>({}, data, [&](auto, auto i) { return c_.start_send(i, to, tag); });
  }
  template <class T>
  request start_receive(std::span<T> data, int from, int tag) {
    return later<T>(data, {}, [&](auto o, auto) { return c_.start_receive(o, from, tag); });
  }

private:
  template <class T, class Call>
  void now(std::span<T> out, std::span<T const> in, Call call) {
    if (!on_device_) {
      call(out, in);
      return;
    }
    mirror<T> memory(*ex_, out, in);
    call(memory.out(), memory.in());
    memory.fetch();
  }
  template <class T, class Call>
  request later(std::span<T> out, std::span<T const> in, Call call) {
    if (!on_device_) return {call(out, in), nullptr, false};
    auto memory = std::make_shared<mirror<T>>(*ex_, out, in);
    auto inner = call(memory->out(), memory->in());
    return {std::move(inner), std::move(memory), c_.options().checked};
  }

  comm::nccl c_;
  exec::cuda* ex_;
  bool on_device_;
};

} // namespace test

#endif
