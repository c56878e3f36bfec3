/// Carries out the steps of a plan, one after another: at once, or as a request that goes on where a
/// collective ends.
#ifndef TESSERA_PARTITION_DETAIL_JOURNEY_HPP
#define TESSERA_PARTITION_DETAIL_JOURNEY_HPP

#include <exception>

#include <tessera/exec/copy.hpp>
#include <tessera/partition/detail/geometry.hpp>
#include <tessera/partition/detail/workspaces.hpp>
#include <tessera/partition/mesh.hpp>

namespace tessera::inline TESSERA_ABI::partition::detail {

/// What is to be done: `steps` live as long as the journey.
template <class T, int Rank>
struct itinerary {
  T* to = nullptr;
  T const* from = nullptr;
  extents<Rank> whole{};
  partitioning before;
  step_list const* steps = nullptr;
  comm::summation order = comm::summation::rank_order;
  site where;
};

template <exec::space Ex, comm::communicator Comm, class T, int Rank>
class journey {
  using memory = typename Ex::memory;
  using span = memory_span<T, memory>;
  using input_span = memory_span<T const, memory>;

public:
  journey(Ex& ex, mesh<Comm>& on, itinerary<T, Rank> const& todo)
      : ex_(&ex), on_(&on), todo_(todo), now_(todo.before), at_(todo.from),
        unwinding_(std::uncaught_exceptions()), workspace_(ex.template handle<workspaces<memory>>()) {
    for (int i = 0; i < todo.steps->size; ++i)
      if (on.size(todo.steps->at[i].along) > 1) last_ = i;
  }
  journey(journey&&) noexcept = default;
  journey& operator=(journey&&) = delete;
  /// As a request of the communicator: waits for its end, or abandons it while an exception unwinds.
  ~journey() {
    if (!pending_ || std::uncaught_exceptions() > unwinding_) return;
    try {
      wait();
    } catch (...) { // a destructor can't say so; the communicator is lost, and its next call says it
    }
  }

  /// All of it, by blocking calls.
  [[gnu::noinline]] void run() {
    for (; next_ <= last_; ++next_) {
      begin<true>();
      finish();
    }
    arrive();
  }
  /// Up to the first collective, which is started.
  [[gnu::noinline]] void start() {
    for (; next_ <= last_; ++next_) {
      begin<false>();
      if (pending_) return;
      finish();
    }
    arrive();
  }
  void wait() {
    while (pending_) {
      pending_.there = false; // where this throws, the journey has ended
      pending_.request.wait();
      go_on();
    }
  }
  bool test() {
    while (pending_) {
      pending_.there = false;
      pending_.there = !pending_.request.test();
      if (pending_) return false;
      go_on();
    }
    return true;
  }

private:
  /// A request that a moved-from journey no longer has.
  struct in_flight {
    typename Comm::request request;
    bool there = false;
    in_flight() = default;
    in_flight(in_flight&& other) noexcept
        : request(static_cast<typename Comm::request&&>(other.request)), there(other.there) {
      other.there = false;
    }
    explicit operator bool() const noexcept { return there; }
  };

  void go_on() {
    finish();
    ++next_;
    start();
  }

  /// Nothing was to be done, or all is.
  void arrive() {
    if (last_ < 0 && todo_.to != todo_.from) {
      auto const mine = local_box(todo_.whole, now_, on_->shape(), on_->place().coordinates());
      copy_block(todo_.to, mine.size(), todo_.from, mine.size(), 1, mine.size());
    }
    workspace_.end();
  }

  template <bool Blocking>
  void begin() {
    auto const& doing = todo_.steps->at[next_];
    stage<Rank> const s(todo_.whole, on_->place(), now_, doing);
    unpacks_ = false;
    if (s.ranks() == 1) {
      target_ = nullptr;
      now_ = s.then;
      return;
    }
    target_ = todo_.to;
    if (next_ < last_) {
      target_ = workspace_.template grow_between<T>(next_ % 2, s.out.size(), todo_.where);
    }
    if (sends(doing.what))
      communicate<Blocking>(s, on_->along(doing.along, todo_.where));
    else
      move(s);
    now_ = s.then;
  }

  void finish() {
    if (target_ == nullptr) return;
    if (unpacks_) {
      auto const& doing = todo_.steps->at[next_];
      auto before = now_;
      for (int i = 0; i < before.size; ++i)
        if (doing.changes[i]) before.at[i] = doing.from;
      stage<Rank> const s(todo_.whole, on_->place(), before, doing);
      T const* piece = workspace_.template grow<T>(&workspace<memory>::arrived, 0, todo_.where);
      for (index_t r = 0; r < s.ranks(); ++r)
        piece = block<false>(s, doing.from.dim, s.before, s.out, r, target_, piece);
    }
    at_ = target_;
  }

  // ---- the collectives

  template <bool Blocking>
  [[gnu::noinline]] void communicate(stage<Rank> const& s, Comm& group) {
    auto const n_in = static_cast<std::size_t>(s.in.size()), n_out = static_cast<std::size_t>(s.out.size());
    input_span in(at_, n_in);
    span out(target_, n_out);
    comm::reduce_options const how{.operation = s.doing.from.operation, .order = todo_.order};
    auto const what = s.doing.what;
    auto const where = todo_.where;
    if (what == movement::all_reduce) {
      if constexpr (Blocking)
        group.all_reduce(out, in, how, where);
      else
        await(group.start_all_reduce(out, in, how, where));
      return;
    }

    bool const cuts = what != movement::all_gather, joins = what != movement::reduce_scatter;
    // A shard that only moves its borders has pieces of each rank's own sizes.
    bool const borders = cuts && joins && s.doing.from.dim == s.doing.to.dim;
    bool const equal = !borders && (!cuts || same_pieces(s, s.doing.to.dim, s.then, s.in)) &&
                       (!joins || same_pieces(s, s.doing.from.dim, s.before, s.out));
    std::span<index_t const> sent, received;
    if (cuts && !equal) sent = counts(workspace_->sent, s, s.doing.to.dim, s.then, s.in);
    if (joins && !equal) received = counts(workspace_->received, s, s.doing.from.dim, s.before, s.out);
    if (cuts && outside(s.in, s.doing.to.dim) > 1) in = input_span(pack(s), n_in);
    if (joins && outside(s.out, s.doing.from.dim) > 1) {
      out = span(workspace_.template grow<T>(&workspace<memory>::arrived, s.out.size(), where), n_out);
      unpacks_ = true;
    }

    if (what == movement::reduce_scatter) {
      if constexpr (Blocking)
        equal ? group.reduce_scatter(out, in, how, where) : group.reduce_scatter_v(out, in, sent, how, where);
      else
        await(equal ? group.start_reduce_scatter(out, in, how, where)
                    : group.start_reduce_scatter_v(out, in, sent, how, where));
    } else if (what == movement::all_gather) {
      if constexpr (Blocking)
        equal ? group.all_gather(out, in, where) : group.all_gather_v(out, in, received, where);
      else
        await(equal ? group.start_all_gather(out, in, where)
                    : group.start_all_gather_v(out, in, received, where));
    } else {
      if constexpr (Blocking)
        equal ? group.all_to_all(out, in, where) : group.all_to_all_v(out, received, in, sent, where);
      else
        await(equal ? group.start_all_to_all(out, in, where)
                    : group.start_all_to_all_v(out, received, in, sent, where));
    }
  }
  void await(typename Comm::request&& one) {
    pending_.request = static_cast<typename Comm::request&&>(one);
    pending_.there = true;
  }

  /// All ranks' pieces are of one size: on every rank the same answer, since the ranges are.
  static bool same_pieces(stage<Rank> const& s, int d, partitioning const& parts, box<Rank> const& mine) {
    auto const first = s.piece(parts, d, mine, 0).size();
    for (index_t r = 1; r < s.ranks(); ++r)
      if (s.piece(parts, d, mine, r).size() != first) return false;
    return true;
  }
  static std::span<index_t const> counts(std::vector<index_t>& into, stage<Rank> const& s, int d,
                                         partitioning const& parts, box<Rank> const& mine) {
    into.resize(static_cast<std::size_t>(s.ranks()));
    for (index_t r = 0; r < s.ranks(); ++r)
      into[static_cast<std::size_t>(r)] =
          outside(mine, d) * s.piece(parts, d, mine, r).size() * inside(mine, d);
    return into;
  }

  /// The ranks' pieces one after another, as a message has them.
  T const* pack(stage<Rank> const& s) {
    auto* const packed = workspace_.template grow<T>(&workspace<memory>::packed, s.in.size(), todo_.where);
    auto* piece = packed;
    for (index_t r = 0; r < s.ranks(); ++r)
      piece = block<true>(s, s.doing.to.dim, s.then, s.in, r, piece, at_);
    return packed;
  }

  /// Copies rank r's piece of dimension d of `mine`: from its place into a message, or out of one. Returns
  /// where the message goes on.
  template <bool Packs, class To, class From>
  auto block(stage<Rank> const& s, int d, partitioning const& parts, box<Rank> const& mine, index_t r, To* to,
             From* from) {
    auto const piece = s.piece(parts, d, mine, r);
    auto const unit = inside(mine, d), rows = outside(mine, d);
    auto const stride = mine.range(d).size() * unit, width = piece.size() * unit;
    auto const offset = piece.empty() ? 0 : (piece.begin - mine.range(d).begin) * unit;
    if constexpr (Packs) {
      copy_block(to, width, from + offset, stride, rows, width);
      return to + rows * width;
    } else {
      copy_block(to + offset, stride, from, width, rows, width);
      return from + rows * width;
    }
  }

  // ---- what sends nothing

  void move(stage<Rank> const& s) {
    auto const what = s.doing.what;
    if (target_ != at_ || what != movement::first_only) refuse_overlap(s);
    if (what == movement::slice) {
      auto const d = s.doing.to.dim;
      auto const unit = inside(s.in, d), width = s.out.range(d).size() * unit;
      copy_block(target_, width, at_ + (s.out.range(d).begin - s.in.range(d).begin) * unit,
                 s.in.range(d).size() * unit, outside(s.in, d), width);
      return;
    }
    bool const keeps = what == movement::first_only && on_->along(s.doing.along, todo_.where).rank() == 0;
    if (!keeps) zero(*ex_, span(target_, static_cast<std::size_t>(s.out.size())), todo_.where);
    if (what == movement::pad) {
      auto const d = s.doing.from.dim;
      auto const unit = inside(s.out, d), width = s.in.range(d).size() * unit;
      copy_block(target_ + (s.in.range(d).begin - s.out.range(d).begin) * unit, s.out.range(d).size() * unit,
                 at_, width, outside(s.in, d), width);
    } else if (keeps && target_ != at_) {
      copy_block(target_, s.in.size(), at_, s.in.size(), 1, s.in.size());
    }
  }
  void refuse_overlap(stage<Rank> const& s) const {
    auto const a = reinterpret_cast<std::uintptr_t>(at_), b = reinterpret_cast<std::uintptr_t>(target_);
    auto const item = sizeof(T);
    if (s.in.size() == 0 || s.out.size() == 0 || a + static_cast<std::size_t>(s.in.size()) * item <= b ||
        b + static_cast<std::size_t>(s.out.size()) * item <= a)
      return;
    throw size_error("E-partition-004", todo_.where, "redistribute: `out` overlaps `x` on rank ", on_->rank(),
                     " of the mesh; a ", name_of(s.doing.what), " needs memory of its own");
  }

  void copy_block(T* to, index_t to_stride, T const* from, index_t from_stride, index_t rows, index_t width) {
    if (rows == 0 || width == 0) return;
    copy_rows(*ex_, view<T, 2, memory>(to, {rows, width}, {to_stride, 1}),
              view<T const, 2, memory>(from, {rows, width}, {from_stride, 1}), todo_.where);
  }

  Ex* ex_;
  mesh<Comm>* on_;
  itinerary<T, Rank> todo_;
  partitioning now_;
  T const* at_;         ///< What the next step reads.
  T* target_ = nullptr; ///< What the step under way writes.
  int next_ = 0, last_ = -1;
  bool unpacks_ = false; ///< The step under way brings pieces that must be put in their places.
  int unwinding_ = 0;
  lease<memory> workspace_; ///< Outlives the request.
  in_flight pending_;
};

} // namespace tessera::inline TESSERA_ABI::partition::detail

#endif
