/// The typed calls of every communicator, written once: lengths checked, the call described, metered, and
/// handed to the engine. The contract of each stands at `comm::communicator`.
#ifndef TESSERA_COMM_DETAIL_INTERFACE_HPP
#define TESSERA_COMM_DETAIL_INTERFACE_HPP

#include <vector>

#include <tessera/comm/detail/describe.hpp>
#include <tessera/comm/detail/request.hpp>

namespace tessera::inline TESSERA_ABI::comm::detail {

/// `Derived` is the communicator: constructible from an engine (what split makes).
template <class Derived, class Engine>
class interface {
public:
  using request = detail::request<Engine>;
  using bulk_memory = typename Engine::bulk_memory;

  interface(interface&& other) noexcept : engine_(other.engine_) {
    other.engine_ = nullptr;
  }
  interface& operator=(interface&& other) noexcept {
    auto* const mine = engine_;
    engine_ = other.engine_;
    other.engine_ = mine;
    return *this;
  }
  ~interface() { delete engine_; }

  int rank() const noexcept { return engine_->rank(); }
  int size() const noexcept { return engine_->size(); }
  communicator_options options() const noexcept { return engine_->options; }
  traffic_meter& meter() noexcept { return engine_->meter; }
  traffic_meter const& meter() const noexcept { return engine_->meter; }
  /// What this communicator itself holds: memory for exchanges, kept from call to call.
  memory_meter const& memory() const noexcept { return engine_->memory; }
  /// An upper bound of the memory that one all_reduce, reduce or reduce_scatter of n T in rank_order or
  /// binary_tree keeps at the unchecked level; calls one after another share it, requests in flight at once
  /// have one each.
  template <reducible_scalar R>
  static constexpr index_t scratch_bytes(index_t n, int ranks) noexcept {
    constexpr auto item = static_cast<index_t>(sizeof(R));
    auto const whole = n * item <= whole_vector_bytes ? ranks * n * item : 0;
    auto const slices = ranks * ((n + ranks - 1) / ranks) * item;
    return (whole > slices ? whole : slices) + table_layout{ranks, false, false}.bytes();
  }

  void barrier(site const& where = site::here()) { block(words().named(collective::barrier), where); }

  template <message_of<Engine> Span>
  void broadcast(Span data, int root, site const& where = site::here()) {
    block(words().broadcast(data, root, where), where);
  }
  template <message_of<Engine> Span>
  [[nodiscard]] request start_broadcast(Span data, int root, site const& where = site::here()) {
    return start(words().broadcast(data, root, where), where);
  }

  template <summand_of<Engine> Span>
  void reduce(Span out, input_like<Span> in, int root, reduce_options how = {},
              site const& where = site::here()) {
    block(summed<Span>(words().reduce(out, in, root, how, where)), where);
  }

  template <summand_of<Engine> Span>
  void all_reduce(Span in_out, reduce_options how = {}, site const& where = site::here()) {
    block(summed<Span>(words().all_reduce(in_out, in_out, how, where)), where);
  }
  template <summand_of<Engine> Span>
  void all_reduce(Span out, input_like<Span> in, reduce_options how = {}, site const& where = site::here()) {
    block(summed<Span>(words().all_reduce(out, in, how, where)), where);
  }
  template <reducible_scalar R>
  [[nodiscard]] R all_reduce(R value, reduce_options how = {}, site const& where = site::here()) {
    all_reduce(std::span<R>(&value, 1), how, where);
    return value;
  }
  template <summand_of<Engine> Span>
  [[nodiscard]] request start_all_reduce(Span in_out, reduce_options how = {},
                                         site const& where = site::here()) {
    return start(summed<Span>(words().all_reduce(in_out, in_out, how, where)), where);
  }
  template <summand_of<Engine> Span>
  [[nodiscard]] request start_all_reduce(Span out, input_like<Span> in, reduce_options how = {},
                                         site const& where = site::here()) {
    return start(summed<Span>(words().all_reduce(out, in, how, where)), where);
  }

  template <summand_of<Engine> Span>
  void reduce_scatter(Span out, input_like<Span> in, reduce_options how = {},
                      site const& where = site::here()) {
    block(summed<Span>(words().reduce_scatter(out, in, nullptr, how, where)), where);
  }
  template <summand_of<Engine> Span>
  void reduce_scatter_v(Span out, input_like<Span> in, counts_span counts, reduce_options how = {},
                        site const& where = site::here()) {
    block(summed<Span>(words().reduce_scatter(out, in, &counts, how, where)), where);
  }
  template <summand_of<Engine> Span>
  [[nodiscard]] request start_reduce_scatter(Span out, input_like<Span> in, reduce_options how = {},
                                             site const& where = site::here()) {
    return start(summed<Span>(words().reduce_scatter(out, in, nullptr, how, where)), where);
  }
  template <summand_of<Engine> Span>
  [[nodiscard]] request start_reduce_scatter_v(Span out, input_like<Span> in, counts_span counts,
                                               reduce_options how = {}, site const& where = site::here()) {
    return start(summed<Span>(words().reduce_scatter(out, in, &counts, how, where)), where);
  }

  template <message_of<Engine> Span>
  void all_gather(Span out, input_like<Span> in, site const& where = site::here()) {
    block(words().gather(collective::all_gather, out, in, nullptr, -1, where), where);
  }
  template <message_of<Engine> Span>
  void all_gather_v(Span out, input_like<Span> in, counts_span counts, site const& where = site::here()) {
    block(words().gather(collective::all_gather, out, in, &counts, -1, where), where);
  }
  template <message_of<Engine> Span>
  [[nodiscard]] request start_all_gather(Span out, input_like<Span> in, site const& where = site::here()) {
    return start(words().gather(collective::all_gather, out, in, nullptr, -1, where), where);
  }
  template <message_of<Engine> Span>
  [[nodiscard]] request start_all_gather_v(Span out, input_like<Span> in, counts_span counts,
                                           site const& where = site::here()) {
    return start(words().gather(collective::all_gather, out, in, &counts, -1, where), where);
  }
  template <message_of<Engine> Span>
  void gather(Span out, input_like<Span> in, int root, site const& where = site::here()) {
    block(words().gather(collective::gather, out, in, nullptr, root, where), where);
  }
  template <message_of<Engine> Span>
  void gather_v(Span out, input_like<Span> in, counts_span counts, int root,
                site const& where = site::here()) {
    block(words().gather(collective::gather, out, in, &counts, root, where), where);
  }

  template <message_of<Engine> Span>
  void scatter(Span out, input_like<Span> in, int root, site const& where = site::here()) {
    block(words().scatter(out, in, nullptr, root, where), where);
  }
  template <message_of<Engine> Span>
  void scatter_v(Span out, input_like<Span> in, counts_span counts, int root,
                 site const& where = site::here()) {
    block(words().scatter(out, in, &counts, root, where), where);
  }

  template <message_of<Engine> Span>
  void all_to_all(Span out, input_like<Span> in, site const& where = site::here()) {
    block(words().all_to_all(out, nullptr, in, nullptr, where), where);
  }
  template <message_of<Engine> Span>
  void all_to_all_v(Span out, counts_span out_counts, input_like<Span> in, counts_span in_counts,
                    site const& where = site::here()) {
    block(words().all_to_all(out, &out_counts, in, &in_counts, where), where);
  }
  template <message_of<Engine> Span>
  [[nodiscard]] request start_all_to_all(Span out, input_like<Span> in, site const& where = site::here()) {
    return start(words().all_to_all(out, nullptr, in, nullptr, where), where);
  }
  template <message_of<Engine> Span>
  [[nodiscard]] request start_all_to_all_v(Span out, counts_span out_counts, input_like<Span> in,
                                           counts_span in_counts, site const& where = site::here()) {
    return start(words().all_to_all(out, &out_counts, in, &in_counts, where), where);
  }

  template <readable_by<Engine> Span>
  void send(Span data, int to, int tag, site const& where = site::here()) {
    block(words().send(data, to, tag, where), where);
  }
  template <message_of<Engine> Span>
  void receive(Span data, int from, int tag, site const& where = site::here()) {
    block(words().receive(data, from, tag, where), where);
  }
  template <readable_by<Engine> Span>
  [[nodiscard]] request start_send(Span data, int to, int tag, site const& where = site::here()) {
    return start(words().send(data, to, tag, where), where);
  }
  template <message_of<Engine> Span>
  [[nodiscard]] request start_receive(Span data, int from, int tag, site const& where = site::here()) {
    return start(words().receive(data, from, tag, where), where);
  }

  [[nodiscard]] Derived split(int color, int key, site const& where = site::here()) {
    if (color < 0)
      throw config_error("E-comm-004", where, "split: color ", color, " on rank ", rank(),
                         ", need 0 or more");
    auto const ranks = static_cast<std::size_t>(size());
    std::int32_t const mine[2] = {color, key};
    std::vector<std::int32_t> all(2 * ranks);
    auto c = words().gather(collective::all_gather, std::span<std::int32_t>(all), mine, nullptr, -1, where);
    c.what = collective::split;
    block(c, where);
    std::vector<int> members; // ranks of my color, by key, then by rank
    for (int r = 0; r < size(); ++r) {
      if (all[2 * static_cast<std::size_t>(r)] != color) continue;
      auto place = members.end();
      while (place != members.begin() &&
             all[2 * static_cast<std::size_t>(place[-1]) + 1] > all[2 * static_cast<std::size_t>(r) + 1])
        --place;
      members.insert(place, r);
    }
    std::int64_t const parts[] = {static_cast<std::int64_t>(engine_->group), engine_->sequence, color};
    auto const group = digest_of(parts, sizeof parts);
    return Derived(engine_->split(members, color, key, group, where));
  }

protected:
  explicit interface(Engine* owned) noexcept : engine_(owned) {}

private:
  describer words() const noexcept { return {rank(), size()}; }
  template <class Span>
  [[gnu::always_inline]] static call summed(call c) noexcept {
    c.combine = Engine::template combiner<typename Span::value_type>();
    return c;
  }
  [[gnu::always_inline]] void meter_call(call const& c) noexcept {
    engine_->meter.count(c.what, payload_items(c) * bytes_of(c.type), sent_items(c) * bytes_of(c.type));
  }
  /// The larger of both sides, without comparing where it is known which that is.
  [[gnu::always_inline]] static index_t payload_items(call const& c) noexcept {
    if (c.what == collective::all_reduce || c.what == collective::reduce_scatter) return c.in_items;
    return c.in_items > c.out_items ? c.in_items : c.out_items;
  }
  /// What leaves this rank, of the calls that the meter has no formula for.
  [[gnu::always_inline]] index_t sent_items(call const& c) const noexcept {
    switch (c.what) {
    case collective::send:
      return c.in_items;
    case collective::gather:
      return rank() == c.root ? 0 : c.in_items;
    case collective::scatter: // `in` is the root's alone
      return c.in_items > 0 ? c.in_items - c.out_items : 0;
    case collective::all_to_all:
      return c.in_items - (c.in_counts != nullptr ? c.in_counts[rank()] : c.count);
    default:
      return 0;
    }
  }
  /// Always inlined, and `c` never given away whole, so that it needs no memory: what is left of a plain call
  /// is the transport's one call.
  [[gnu::always_inline]] void block(call const& c, site const& where) {
    if constexpr (Engine::direct)
      // One branch: what a processor remembers of ours is little after a library that waited in loops.
      if (__builtin_expect(!(c.on_device | !engine_->plain() | engine_->meter.times_calls() |
                             needs_staging(c) | (c.reduces() & c.fixes_order())),
                           true)) {
        meter_call(c);
        return engine_->run(c, where);
      }
    block_in_steps(call{c.what, c.type, c.in, c.out, c.in_items, c.out_items, c.count, c.in_counts,
                        c.out_counts, c.root, c.tag, c.operation, c.order, c.combine, c.on_device, where});
  }
  [[gnu::noinline]] void block_in_steps(call const& c) {
    timed_scope timer(engine_->meter, c.what);
    meter_call(c);
    engine_->complete(engine_->begin(c, true));
  }
  request start(call c, site const& where) {
    c.where = where;
    timed_scope timer(engine_->meter, c.what);
    meter_call(c);
    return request(*engine_, engine_->begin(c, false));
  }

  Engine* engine_;
};

} // namespace tessera::inline TESSERA_ABI::comm::detail

#endif
