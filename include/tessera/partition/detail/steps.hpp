/// The cheapest way from one partitioning to another: a search over what single collectives lead to, made by
/// the compiler.
#ifndef TESSERA_PARTITION_DETAIL_STEPS_HPP
#define TESSERA_PARTITION_DETAIL_STEPS_HPP

#include <tessera/partition/placements.hpp>

namespace tessera::inline TESSERA_ABI::partition {

/// What one step of a plan does. The last three send nothing.
enum class movement : std::uint8_t {
  all_reduce,     ///< partial -> whole
  reduce_scatter, ///< partial -> shard
  all_gather,     ///< shard -> whole
  all_to_all,     ///< shard -> another shard
  slice,          ///< whole -> shard: a part is copied
  pad,            ///< shard -> partial: the part among zeros
  first_only      ///< whole -> partial: the first rank's value, zeros on the others
};

constexpr char const* name_of(movement what) noexcept {
  constexpr char const* names[] = {"all_reduce", "reduce_scatter", "all_gather", "all_to_all", "slice",
                                   "pad",        "first_only"};
  return names[static_cast<std::size_t>(what)];
}
constexpr bool sends(movement what) noexcept {
  return what < movement::slice;
}

/// A change of placement along one axis, or along two at once.
struct step {
  movement what = movement::all_reduce;
  axis_set along;
  bool changes[max_axes] = {}; ///< Which of the partitioning's axes these are.
  placement from, to;
};

inline constexpr int max_steps = 4 * max_axes;

struct step_list {
  step at[max_steps] = {};
  int size = 0;
};

/// The partitioning after a step.
constexpr partitioning after(partitioning parts, step const& s) noexcept {
  for (int i = 0; i < parts.size; ++i)
    if (s.changes[i]) parts.at[i] = s.to;
  return parts;
}

namespace detail {

constexpr movement movement_of(placement const& from, placement const& to) noexcept {
  if (from.sums()) return to.whole() ? movement::all_reduce : movement::reduce_scatter;
  if (to.sums()) return from.whole() ? movement::first_only : movement::pad;
  if (from.whole()) return movement::slice;
  return to.whole() ? movement::all_gather : movement::all_to_all;
}

/// Elements that a rank sends, for a tensor of one element in all and `ranks` along the step's axes; plus a
/// little for each message and less for each copy, so that a longer way must save something.
constexpr double cost_of(movement what, double in, double out, double ranks) noexcept {
  constexpr double message = 0.02, local_copy = 0.001;
  auto const others = (ranks - 1) / ranks;
  if (what == movement::all_reduce) return 2 * (in * others + message);
  if (!sends(what)) return local_copy;
  return (what == movement::all_gather ? out : in) * others + message;
}

/// States are numbers whose digits, one an axis, count the placements worth trying: `invariant` stands for
/// all that is whole, then partial, then shards. All axes count as four ranks: their sizes are known at run
/// time alone, and with other sizes one way is seldom another's better by much.
class step_search {
public:
  constexpr step_search(partitioning const& from, partitioning const& to) : from_(from), to_(to) {
    options_[count_++] = invariant::value;
    options_[count_++] = partial<>::value;
    for (int i = 0; i < from.size; ++i) {
      offer(from.at[i]);
      offer(to.at[i]);
    }
    if (from.size > 1) offer(shard<0>::value); // summing along two axes goes by way of a part
  }

  constexpr step_list run() {
    auto const begin = number_of(from_), end = number_of(to_);
    for (auto& each : best_) each = -1;
    best_[begin] = 0;
    queue(begin);
    while (queued_ > 0) {
      auto const at = queue_[head_];
      head_ = (head_ + 1) % max_states;
      --queued_;
      waits_[at] = false;
      expand(at);
    }
    step_list found;
    for (auto at = end; at != begin; at = came_from_[at]) ++found.size;
    auto i = found.size;
    for (auto at = end; at != begin; at = came_from_[at]) found.at[--i] = by_[at];
    return found;
  }

private:
  static constexpr int max_options = 3 + 2 * max_axes;
  static constexpr int max_states = max_options * max_options * max_options;
  static_assert(max_axes == 3);

  constexpr void offer(placement const& p) {
    if (p.kind != placement_kind::shard) return;
    for (int i = 0; i < count_; ++i)
      if (options_[i] == p) return;
    options_[count_++] = p;
  }
  constexpr int digit_of(placement const& p) const {
    if (p.whole()) return 0;
    if (p.sums()) return 1;
    int i = 2;
    while (!(options_[i] == p)) ++i;
    return i;
  }
  constexpr int number_of(partitioning const& parts) const {
    int number = 0;
    for (int i = parts.size; i-- > 0;) number = number * count_ + digit_of(parts.at[i]);
    return number;
  }
  constexpr void queue(int state) {
    if (waits_[state]) return;
    waits_[state] = true;
    queue_[(head_ + queued_++) % max_states] = state;
  }

  /// Tries every step from a state.
  constexpr void expand(int state) {
    int digits[max_axes] = {};
    for (int i = 0, rest = state; i < from_.size; ++i, rest /= count_) digits[i] = rest % count_;
    for (int i = 0; i < from_.size; ++i)
      for (int d = 0; d < count_; ++d) {
        if (d == digits[i]) continue;
        try_step(state, digits, i, i, d);
        for (int j = i + 1; j < from_.size; ++j)
          if (digits[j] == digits[i] && from_.axes[i] == axis::data && from_.axes[j] == axis::context)
            try_step(state, digits, i, j, d);
      }
  }

  /// The placement that a digit stands for along axis i.
  constexpr placement at(int digit, int i) const {
    if (digit == 1) return from_.at[i].sums() ? from_.at[i] : to_.at[i];
    if (digit == 0 && to_.at[i].whole()) return to_.at[i];
    return digit == 0 && from_.at[i].whole() ? from_.at[i] : options_[digit];
  }

  /// Axis i, or i and j together (the mesh has their communicator), to digit d.
  constexpr void try_step(int state, int const (&digits)[max_axes], int i, int j, int d) {
    bool const joint = i != j;
    if (d == 1 && (!to_.at[i].sums() || from_.at[i].sums() || joint)) return; // no use on the way
    if (d == 1 && to_.at[i].operation != comm::reduction::sum) return;
    auto const here = at(digits[i], i), there = at(d, i);
    for (int k = i + 1; k < from_.size; ++k) // a cut inside this one would have to move
      if (k != j && digits[k] > 1)
        if (here.cuts(options_[digits[k]].dim) || there.cuts(options_[digits[k]].dim)) return;
    step s{.what = movement_of(here, there), .along = from_.axes[i], .from = here, .to = there};
    s.along = s.along | from_.axes[j];
    s.changes[i] = s.changes[j] = true;
    if (joint && !sends(s.what)) return;

    double in = 1, out = 1;
    int number = 0, unit = 1;
    for (int k = 0; k < from_.size; ++k, unit *= count_) {
      auto const next = s.changes[k] ? d : digits[k];
      in /= digits[k] > 1 ? 4 : 1;
      out /= next > 1 ? 4 : 1;
      number += next * unit;
    }
    auto cost = best_[state] + cost_of(s.what, in, out, joint ? 16 : 4);
    // Ranks along an axis where nothing changes are left out of it wherever there is a way.
    for (int k = 0; k < from_.size; ++k)
      if (s.changes[k] && digit_of(from_.at[k]) == digit_of(to_.at[k])) cost += 100;
    if (best_[number] >= 0 && best_[number] <= cost) return;
    best_[number] = cost;
    came_from_[number] = state;
    by_[number] = s;
    queue(number);
  }

  partitioning from_, to_;
  placement options_[max_options] = {};
  int count_ = 0;
  double best_[max_states] = {};
  int came_from_[max_states] = {};
  step by_[max_states] = {};
  int queue_[max_states] = {};
  bool waits_[max_states] = {};
  int head_ = 0, queued_ = 0;
};

} // namespace detail

/// The cheapest steps from one partitioning of a tensor to another of the same axes.
constexpr step_list cheapest_steps(partitioning const& from, partitioning const& to) {
  return detail::step_search(from, to).run();
}

} // namespace tessera::inline TESSERA_ABI::partition

#endif
