/// Drives the calls of one nccl communicator. Everything that a call needs is put into the lane when the call
/// is made, exchange, sum and collection one after another; what is left is to wait for its event.
#ifndef TESSERA_COMM_DETAIL_NCCL_ENGINE_HPP
#define TESSERA_COMM_DETAIL_NCCL_ENGINE_HPP

#if defined(TESSERA_WITH_NCCL)

#include <algorithm>
#include <tessera/comm/detail/nccl_operation.hpp>

namespace tessera::inline TESSERA_ABI::comm::detail {

class nccl_engine {
public:
  using bulk_memory = exec::cuda_memory;
  template <memory_space Memory>
  static constexpr bool reaches = Memory::host_accessible || std::same_as<Memory, exec::cuda_memory>;
  static constexpr bool direct = false;
  template <reducible_scalar S>
  static constexpr combine_function combiner() noexcept {
    return &combine_on_device<S>;
  }

  using op = nccl_operation;

  nccl_engine(std::unique_ptr<nccl_link> link, communicator_options options, std::uint64_t group)
      : options(options), group(group), link_(static_cast<std::unique_ptr<nccl_link>&&>(link)),
        signs_(options.checked || options.stall_limit > 0), ready_(link_->lane), exchanged_(link_->lane),
        sends_(static_cast<std::size_t>(size())), receives_(static_cast<std::size_t>(size())) {
    meter = traffic_meter(size());
  }
  nccl_engine(nccl_engine const&) = delete;
  nccl_engine& operator=(nccl_engine const&) = delete;
  ~nccl_engine() {
    link_.reset(); // first: what is under way still uses the memory of operations
    for (auto* spare = spare_; spare != nullptr;) {
      auto* const next = spare->next;
      delete spare;
      spare = next;
    }
  }

  communicator_options const options;
  std::uint64_t const group;
  traffic_meter meter;
  memory_meter memory;
  std::int64_t sequence = 0;

  int rank() const noexcept { return link_->rank; }
  int size() const noexcept { return link_->size; }
  nccl_engine* split(std::vector<int> const& members, int color, int key, std::uint64_t id, site where) {
    exec::detail::device_scope const on(link_->compute.device(), where);
    auto const mine = std::find(members.begin(), members.end(), rank()) - members.begin();
    return new nccl_engine(std::make_unique<nccl_link>(*link_, color, key, narrow<int>(mine),
                                                       narrow<int>(members.size()), where),
                           options, id);
  }
  /// Throws config_error on all ranks where their options differ.
  void agree_on_options(site where) {
    auto& one = take({}, true);
    one.request.where = where;
    one.doing = "the beginning of comm::nccl";
    std::vector<communicator_terms> all(static_cast<std::size_t>(size()));
    communicator_terms const mine(options);
    gather_bytes(one, &mine, static_cast<index_t>(sizeof mine), all.data());
    recycle(one);
    compare_terms(all, rank(), where);
  }

  op& begin(call const& c, bool blocking) {
    exec::detail::device_scope const on(link_->compute.device(), c.where);
    if (lost()) throw_lost(c);
    auto& one = take(c, blocking);
    try {
      link_->check(one);
      put(one);
    } catch (...) {
      end_with_error(one);
    }
    return one;
  }
  /// Whether it has ended. Never waits; never in a graph.
  bool advance(op& one) {
    if (one.finished) return true;
    exec::detail::device_scope const on(link_->compute.device(), one.request.where);
    try {
      if (lost()) throw_lost(one.request);
      if (one.waiting) send_messages(one);
      if (link_->compute.capturing(one.request.where) || !link_->passed(one.ended, one)) return false;
      finish(one);
    } catch (...) {
      end_with_error(one);
    }
    return true;
  }
  /// Orders the compute stream after it, and the host where it must see the end; frees it; throws what it
  /// ended with.
  void complete(op& one) {
    exec::detail::device_scope const on(link_->compute.device(), one.request.where);
    if (!one.finished) {
      try {
        if (lost()) throw_lost(one.request);
        if (one.waiting) send_messages(one);
        if (!one.on_device || one.adds_integers || options.checked || options.stall_limit > 0)
          link_->wait(one.ended, one);
        else
          one.ended.wait_in(link_->compute, one.request.where);
        finish(one);
      } catch (...) {
        end_with_error(one);
      }
    }
    free(one);
  }
  /// Frees a finished operation, and throws what it ended with.
  void free(op& one) {
    if (!one.error && one.lent.any()) {
      try {
        give_back(one);
      } catch (...) {
        one.error = std::current_exception();
      }
    }
    auto const error = static_cast<std::exception_ptr&&>(one.error);
    one.error = nullptr;
    recycle(one);
    if (error) std::rethrow_exception(error);
  }
  /// Gives an operation up: its peers cannot finish, nor can this communicator go on.
  void abandon(op& one) noexcept {
    lose();
    std::erase(messages_, &one);
    recycle(one);
  }
  void lose() noexcept { link_->abort(); }

private:
  memory_account account() noexcept { return {&memory, memory_kind::communication}; }
  /// What is not the payload of a call on device memory.
  memory_account staging() noexcept { return {&memory, memory_kind::other}; }
  void* pinned_room(buffer<exec::pinned_memory>& memory, index_t bytes, site where) {
    return outgrown_.room(memory, bytes, staging(), where);
  }
  bool lost() const noexcept { return link_->lost(); }
  [[noreturn]] static void throw_lost(call const& c) {
    throw peer_failed("E-comm-016", c.where, name_of(c.what),
                      " on a communicator that an earlier failure or an abandoned request made useless");
  }

  op& take(call const& c, bool blocking) {
    auto* one = spare_;
    if (one == nullptr) {
      auto made = std::make_unique<op>();
      made->ended = exec::event(link_->lane, {}, c.where);
      one = made.release();
    } else {
      spare_ = one->next;
    }
    one->reset(c, group, blocking);
    return *one;
  }
  void recycle(op& one) noexcept {
    one.next = spare_;
    spare_ = &one;
  }
  void end_with_error(op& one) noexcept {
    one.error = std::current_exception();
    one.finished = true;
    std::erase(messages_, &one);
  }

  /// Puts all of a call into the lane; a message waits for others.
  void put(op& one) {
    auto& c = one.request;
    bool const message = c.is_point_to_point();
    if (!message) one.sequence = ++sequence;
    if (signs_) (void)one.signed_by(size());
    if (c.has_own_counts() && c.in_counts[rank()] != c.out_counts[rank()])
      throw collective_mismatch("E-comm-011", c.where, one.text(size()), ": rank ", rank(), " sends ",
                                c.in_counts[rank()], " elements to itself and expects ",
                                c.out_counts[rank()]);
    if (options.checked && !message && size() > 1) compare(one);
    if (options.checked && !one.blocking) lend(one);
    ready_.record(link_->compute, c.where);
    ready_.wait_in(link_->lane, c.where);
    if (!c.on_device) stage(one);
    if (message) {
      one.waiting = true;
      messages_.push_back(&one);
      return;
    }
    if (c.reduces() && (c.fixes_order() || !nccl_adds(c.type)))
      put_in_fixed_order(one);
    else
      put_natively(one);
    c.in_counts = c.out_counts = nullptr; // the caller's no longer
    seal(one);
  }
  /// Its last step is in the lane.
  void seal(op& one) {
    auto const& c = one.request;
    if (one.host_out != nullptr)
      link_->copy(at(one.host_stage.data(), one.host_out_offset), c.out, one.host_out_bytes, c.where);
    one.ended.record(link_->lane, c.where);
  }
  /// It has ended on the device, or, where nobody looks at it here, will.
  void finish(op& one) {
    auto const& c = one.request;
    one.finished = true;
    if (one.adds_integers && *one.overflow() != 0)
      throw numeric_error("E-comm-012", c.where, name_of(c.what), ": a sum over ranks does not fit ",
                          name_of(c.type), "; reduce in a wider type");
    if (one.host_out != nullptr)
      copy(one.host_out, at(one.host_stage.data(), one.host_out_offset), one.host_out_bytes);
    if (options.checked && c.what == collective::receive) one.compare_headers();
  }

  void put_natively(op& one) {
    auto const& c = one.request;
    auto step = transfer_of(c);
    auto const item = bytes_of(c.type);
    bool const in_place = c.what == collective::reduce_scatter &&
                          c.out == at(c.in, offset_of(rank(), c.count, c.in_counts) * item);
    if (!needs_staging(c) || in_place) return link_->enqueue(step, one);
    step.out = room(one.pieces, c.out_items * item, account(), c.where);
    link_->enqueue(step, one);
    link_->copy(c.out, step.out, c.out_items * item, c.where);
  }

  void put_in_fixed_order(op& one) {
    auto const& c = one.request;
    if (size() == 1) return link_->copy(c.out, c.in, c.in_items * bytes_of(c.type), c.where);
    rank_order_steps const steps{c, rank(), size()};
    auto const flag_at = op::rounded(steps.pieces_bytes());
    auto* pieces = room(one.pieces, flag_at + static_cast<index_t>(sizeof(int)), account(), c.where);
    link_->enqueue(steps.exchange(pieces, sends_.data(), receives_.data()), one);
    one.adds_integers = is_integer(c.type) && c.operation == reduction::sum;
    device_combine_space space{link_->lane, nullptr};
    if (one.adds_integers) {
      space.overflow = reinterpret_cast<int*>(at(pieces, flag_at));
      exec::cuda_check(cudaMemsetAsync(space.overflow, 0, sizeof(int), link_->lane.stream()),
                       "cudaMemsetAsync", c.where);
    }
    (void)c.combine(&space, steps.sum(pieces));
    if (steps.collects()) link_->enqueue(steps.collect(pieces, sends_.data()), one);
    if (!one.adds_integers) return;
    transfer agree; // one overflow is everybody's
    agree.what = collective::all_reduce;
    agree.type = element::i32;
    agree.operation = reduction::max;
    agree.in = agree.out = space.overflow;
    agree.count = 1;
    link_->enqueue(agree, one);
    if (one.on_device) (void)pinned_room(one.host_stage, op::alignment, c.where);
    link_->copy(one.overflow(), space.overflow, sizeof(int), c.where);
  }

  /// Lets a call on host memory work on device memory. The first bytes of the host's side are the flag's.
  void stage(op& one) {
    auto& c = one.request;
    constexpr auto alignment = op::alignment;
    constexpr auto rounded = &op::rounded;
    auto const given = c.in == nullptr ? 0 : c.in_items * bytes_of(c.type);
    auto const wanted = c.out == nullptr ? 0 : c.out_items * bytes_of(c.type);
    auto const bytes = rounded(given) + rounded(wanted);
    auto* device = room(one.device_stage, bytes, staging(), c.where);
    auto* host = at(pinned_room(one.host_stage, alignment + bytes, c.where), alignment);
    if (given > 0) {
      copy(host, c.in, given);
      link_->copy(device, host, given, c.where);
    }
    if (wanted > 0) {
      one.host_out = c.out;
      one.host_out_bytes = wanted;
      one.host_out_offset = alignment + rounded(given);
    }
    c.in = device;
    c.out = at(device, rounded(given));
  }

  // --- the checked level

  /// `bytes` of every rank, over NCCL; the host waits.
  void gather_bytes(op& one, void const* mine, index_t bytes, void* all) {
    auto const where = one.request.where;
    auto const total = bytes * size();
    auto* host = pinned_room(exchanged_host_, total, where);
    auto* device = room(exchanged_device_, total, staging(), where);
    copy(at(host, bytes * rank()), mine, bytes);
    link_->copy(at(device, bytes * rank()), at(host, bytes * rank()), bytes, where);
    transfer step;
    step.what = collective::all_gather;
    step.in = at(device, bytes * rank());
    step.out = device;
    step.count = bytes;
    link_->enqueue(step, one);
    link_->copy(host, device, total, where);
    exchanged_.record(link_->lane, where);
    link_->wait(exchanged_, one);
    copy(all, host, total);
  }
  void compare(op& one) {
    auto const& c = one.request;
    auto const ranks = static_cast<std::size_t>(size());
    std::vector<signature> signs(ranks);
    gather_bytes(one, &one.sign, static_cast<index_t>(sizeof(signature)), signs.data());
    compare_signatures(signs.data(), size(), rank(), c.where);
    if (!c.has_own_counts()) return;
    std::vector<index_t> mine(c.in_counts, c.in_counts + size()), all(2 * ranks * ranks);
    mine.insert(mine.end(), c.out_counts, c.out_counts + size());
    gather_bytes(one, mine.data(), 2 * size() * static_cast<index_t>(sizeof(index_t)), all.data());
    compare_counts(all.data(), size(), one.sign, c.where);
  }

  /// Bytes by way of the host need room there.
  device_store store_of(op& one) {
    auto const& c = one.request;
    auto const items = c.in_items > c.out_items ? c.in_items : c.out_items;
    return {*link_, exchanged_, pinned_room(exchanged_host_, items * bytes_of(c.type), c.where), one};
  }
  // Guarding happens in the compute stream, in front of the call and when the host has seen its end. In the
  // lane it would wait for messages under way, and with it the compute stream that those may depend on.
  void lend(op& one) {
    if (!one.on_device) return one.lent.lend(host_store(), one.request, one.host_copies, account());
    one.lent.lend(store_of(one), one.request, one.device_copies, account());
  }
  void give_back(op& one) {
    auto const where = one.request.where;
    if (!one.on_device) return one.lent.give_back(host_store(), one.sign, one.host_copies.data(), where);
    one.lent.give_back(store_of(one), one.sign, one.device_copies.data(), where);
  }

  // --- messages

  /// Sends all that wait, as one group. A checked message is preceded by its signature, with the tag as its
  /// number.
  void send_messages(nccl_call& asking) {
    auto const going = static_cast<std::vector<op*>&&>(messages_);
    messages_.clear();
    auto sorted = going;
    std::stable_sort(sorted.begin(), sorted.end(),
                     [](op* a, op* b) { return a->request.tag < b->request.tag; });
    constexpr auto header = static_cast<index_t>(sizeof(signature));
    if (options.checked)
      for (auto* one : sorted) {
        auto* host = pinned_room(one->host_headers, 2 * header, one->request.where);
        auto tagged = one->sign;
        tagged.sequence = one->request.tag;
        std::memcpy(host, &tagged, sizeof tagged);
        link_->copy(room(one->device_headers, 2 * header, staging(), one->request.where), host, header,
                    one->request.where);
      }
    link_->grouped(asking, [&] {
      for (auto* one : sorted) {
        auto const& c = one->request;
        bool const sends = c.what == collective::send;
        if (options.checked) {
          auto* headers = one->device_headers.data();
          sends ? link_->put_send(headers, header, element::bytes, c.root, *one)
                : link_->put_receive(at(headers, header), header, element::bytes, c.root, *one);
        }
        sends ? link_->put_send(c.in, c.count, c.type, c.root, *one)
              : link_->put_receive(c.out, c.count, c.type, c.root, *one);
      }
    });
    for (auto* one : going) {
      one->waiting = false;
      if (options.checked && one->request.what == collective::receive)
        link_->copy(at(one->host_headers.data(), header), at(one->device_headers.data(), header), header,
                    one->request.where);
      seal(*one);
    }
  }

  std::unique_ptr<nccl_link> link_;
  bool const signs_;
  exec::event ready_;                     // what the compute stream had been given
  exec::event exchanged_;                 // bytes are there for the host to read
  std::vector<index_t> sends_, receives_; // counts of one step
  buffer<exec::cuda_memory> exchanged_device_;
  buffer<exec::pinned_memory> exchanged_host_;
  outgrown_memory outgrown_;
  std::vector<op*> messages_; // that wait to go out
  op* spare_ = nullptr;
};

} // namespace tessera::inline TESSERA_ABI::comm::detail

#endif

#endif
