/// The messages of a pipeline stage in one direction, and the buffers that they are received into.
#ifndef TESSERA_PARALLEL_DETAIL_PIPELINE_MESSAGES_HPP
#define TESSERA_PARALLEL_DETAIL_PIPELINE_MESSAGES_HPP

#include <vector>

#include <tessera/comm/communicator.hpp>
#include <tessera/core/tensor.hpp>
#include <tessera/exec/space.hpp>
#include <tessera/layout/schedule.hpp>

namespace tessera::inline TESSERA_ABI::parallel::detail {

/// How much of everything a stage's list needs at once.
struct pipeline_needs {
  int slots = 0;     ///< Micro-batches between their forward and the end of their backward.
  int inputs = 0;    ///< Received activations, which the backward may need, and one received ahead.
  int gradients = 0; ///< At work or waiting for it, one received ahead, and one being sent.
  bool halves = false;

  static pipeline_needs of(layout::schedule const& plan, int stage) {
    using enum layout::action_kind;
    pipeline_needs most, now;
    bool sends_gradients = false, receives_gradients = false;
    for (auto a : plan.actions[static_cast<std::size_t>(stage)]) {
      auto const first = a.kind == backward || a.kind == backward_input;
      if (a.kind == forward) ++now.slots;
      if (a.kind == receive_activation) ++now.inputs;
      // Made by a receive or by the last part; handed on without a message on a single stage.
      if (a.kind == receive_gradient || (first && plan.part_of(stage, a.chunk) + 1 == plan.parts()))
        ++now.gradients;
      receives_gradients = receives_gradients || a.kind == receive_gradient;
      sends_gradients = sends_gradients || a.kind == send_gradient;
      most.halves = most.halves || a.kind == backward_input;
      most.slots = now.slots > most.slots ? now.slots : most.slots;
      most.inputs = now.inputs > most.inputs ? now.inputs : most.inputs;
      most.gradients = now.gradients > most.gradients ? now.gradients : most.gradients;
      if (a.kind == send_gradient || (first && plan.part_of(stage, a.chunk) == 0)) --now.gradients;
      if (a.kind != backward && a.kind != backward_weights) continue;
      --now.slots;
      if (plan.has_before(stage, a.chunk)) --now.inputs;
    }
    if (most.inputs > 0) ++most.inputs;
    most.gradients += (receives_gradients ? 1 : 0) + (sends_gradients ? 1 : 0);
    return most;
  }
};

/// One direction: activations or gradients. Messages are started in the order of the stage's list, each
/// receive as early as that allows, and one ahead at most.
template <comm::communicator Comm, exec::space Ex, storage_scalar T>
class message_lane {
public:
  using memory = typename Ex::memory;
  using request = typename Comm::request;
  using message = memory_span<T, memory>;

  /// Called by all stages. Splits a communicator off, so that the two directions do not wait for each other.
  message_lane(Comm& stages, int buffers, index_t elements, memory_account account, site where)
      : comm_(stages.split(0, stages.rank(), where)), buffers_(static_cast<std::size_t>(buffers)) {
    for (auto& b : buffers_) b.storage = tensor<T, 1, memory>({elements}, account, where);
    kept_.reserve(buffers_.size());
  }

  Comm& communicator() noexcept { return comm_; }

  /// At the beginning of a step of `list`, of which every message of these two kinds is this lane's.
  void begin(std::vector<layout::action> const& list, layout::action_kind send,
             layout::action_kind receive) noexcept {
    list_ = &list;
    send_ = send;
    receive_ = receive;
    next_ = 0;
  }
  /// At its end: waits for what was sent.
  void finish() {
    for (auto& b : buffers_) b.sending.wait();
  }
  /// After a failure.
  void drop() noexcept {
    coming_ = {};
    coming_buffer_ = -1;
    fresh_ = nullptr;
    for (auto& b : buffers_) b.sending = {}, b.held = false;
    kept_.clear();
  }

  /// Starts the next receive of the list if nothing of the list comes before it. `from` and `elements` are
  /// functions of the action.
  template <std::invocable<layout::action> From, std::invocable<layout::action> Elements>
  void receive_ahead(From&& from, Elements&& elements) {
    for (; next_ < list_->size() && coming_buffer_ < 0; ++next_) {
      auto const a = (*list_)[next_];
      if (a.kind == send_) return;
      if (a.kind != receive_) continue;
      auto const buffer = free_buffer(false);
      if (buffer < 0) return;
      start_receive(buffer, from(a), elements(a));
    }
  }
  /// Receives message `a`, and keeps it.
  void receive(layout::action a, std::size_t place, int from, index_t elements) {
    if (coming_buffer_ < 0) {
      start_receive(free_buffer(true), from, elements);
      next_ = place + 1;
    }
    coming_.wait();
    keep(a, coming_buffer_);
    coming_buffer_ = -1;
  }

  /// Receives outside of any list.
  int receive_now(int from, index_t elements) {
    auto const buffer = take_buffer();
    auto coming = comm_.start_receive(first_of(buffer, elements), from, 0);
    coming.wait();
    return buffer;
  }

  /// Sends from memory that is left alone until the request has ended. The receive that comes next in the
  /// list is started with it: where messages go out together (comm::nccl), neither then waits for the other's
  /// end.
  template <std::invocable<layout::action> From, std::invocable<layout::action> Elements>
  void send(request& sending, memory_span<T const, memory> data, std::size_t place, From&& peer,
            Elements&& elements) {
    next_ = place + 1;
    sending = comm_.start_send(data, peer((*list_)[place]), 0);
    fresh_ = &sending;
    receive_ahead(peer, elements);
    fresh_ = nullptr;
    (void)sending.test(); // it is on its way, whatever this stage does next
  }
  /// Sends from a buffer, which is free again when it has gone.
  template <std::invocable<layout::action> From, std::invocable<layout::action> Elements>
  void send_buffer(int buffer, std::size_t place, From&& peer, Elements&& elements) {
    auto& b = at(buffer);
    b.held = false;
    send(b.sending, first_of(buffer, elements((*list_)[place])), place, peer, elements);
  }
  /// Sends outside of any list.
  request send_now(memory_span<T const, memory> data, int to) {
    auto sending = comm_.start_send(data, to, 0);
    (void)sending.test();
    return sending;
  }

  /// A buffer that nobody holds; waits for one that is still being sent.
  int take_buffer() { return hold(free_buffer(true)); }
  void give_back(int buffer) noexcept {
    if (buffer >= 0) at(buffer).held = false;
  }
  message first_of(int buffer, index_t elements) {
    return at(buffer).storage.span().first(static_cast<std::size_t>(elements));
  }
  T* data_of(int buffer) { return at(buffer).storage.data(); }

  /// Buffers that wait for the work of micro-batch and chunk `a`.
  void keep(layout::action a, int buffer) { kept_.push_back({a.micro_batch, a.chunk, buffer}); }
  int take_kept(layout::action a) {
    for (auto& k : kept_)
      if (k.micro_batch == a.micro_batch && k.chunk == a.chunk) {
        auto const buffer = k.buffer;
        k = kept_.back();
        kept_.pop_back();
        return buffer;
      }
    throw config_error("E-parallel-084", site::here(), "pipeline: nothing is there for the ", text_of(a));
  }

private:
  struct buffer_state {
    tensor<T, 1, memory> storage;
    bool held = false;
    request sending;
  };
  struct kept_buffer {
    int micro_batch, chunk, buffer;
  };

  buffer_state& at(int buffer) { return buffers_[static_cast<std::size_t>(buffer)]; }
  int hold(int buffer) {
    at(buffer).held = true;
    return buffer;
  }

  int free_buffer(bool wait) {
    for (int i = 0; i < narrow<int>(buffers_.size()); ++i)
      if (!at(i).held && &at(i).sending != fresh_ && at(i).sending.test()) return i;
    for (int i = 0; wait && i < narrow<int>(buffers_.size()); ++i)
      if (!at(i).held) {
        at(i).sending.wait();
        return i;
      }
    if (!wait) return -1;
    throw config_error("E-parallel-084", site::here(), "pipeline: all ", buffers_.size(),
                       " buffers of a direction are held, more than the plan said");
  }
  void start_receive(int buffer, int from, index_t elements) {
    coming_buffer_ = hold(buffer);
    coming_ = comm_.start_receive(first_of(buffer, elements), from, 0);
    (void)coming_.test(); // where messages go out together, this one does not wait for the next
  }

  Comm comm_;
  std::vector<buffer_state> buffers_;
  std::vector<kept_buffer> kept_;
  std::vector<layout::action> const* list_ = nullptr;
  layout::action_kind send_ = layout::action_kind::send_activation;
  layout::action_kind receive_ = layout::action_kind::receive_activation;
  std::size_t next_ = 0;           ///< The first message of the list that may not have been started yet.
  request const* fresh_ = nullptr; ///< Started, and not to go out before the next receive has been, too.
  request coming_;
  int coming_buffer_ = -1; ///< Where it comes to; -1 while there is none.
};

} // namespace tessera::inline TESSERA_ABI::parallel::detail

#endif
