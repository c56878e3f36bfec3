/// Checks a pipeline schedule before it runs, and says when each action would happen.
///
///     auto plan = make_schedule(schedule_kind::zero_bubble, {.stages = 4, .micro_batches = 8});
///     auto run = simulate(plan, schedule_durations{.forward = 1});
///     run.bubble_share();  run.most_live(stage);  run.stages[stage][i].begin;
///
/// Messages are as the runner's: a stage goes on after a send, as long as no more than `in_flight` of its
/// messages of that kind to that stage are not yet received; a receive waits for its message. A list that
/// passes here therefore ends when it runs.
///
/// Cost: one pass over the actions for each round of waiting, O(actions * stages) at worst; nothing runs.
#ifndef TESSERA_LAYOUT_SCHEDULE_SIMULATOR_HPP
#define TESSERA_LAYOUT_SCHEDULE_SIMULATOR_HPP

#include <type_traits>

#include <tessera/core/extents.hpp>
#include <tessera/layout/schedule.hpp>

namespace tessera::inline TESSERA_ABI::layout {

/// How long actions take, in any unit. A whole backward takes both halves.
struct schedule_durations {
  double forward = 1;
  double backward_input = 1;
  double backward_weights = 1;
  double message = 0; ///< From a send until its receive can end.

  constexpr double operator()(int, action a) const noexcept {
    switch (a.kind) {
    case action_kind::forward:
      return forward;
    case action_kind::backward:
      return backward_input + backward_weights;
    case action_kind::backward_input:
      return backward_input;
    case action_kind::backward_weights:
      return backward_weights;
    default:
      return sends(a.kind) ? message : 0;
    }
  }
};

/// duration(stage, action); of a send it is the time that the message travels, of a receive it is not asked.
template <class F>
concept action_durations = std::is_invocable_r_v<double, F const&, int, action>;

struct timed_action {
  action what;
  double begin = 0;
  double end = 0;
};

/// When the actions of each stage happen, by simulation or as measured (parallel/pipeline.hpp).
struct schedule_timeline {
  std::vector<std::vector<timed_action>> stages;

  /// From the first action's begin to the last one's end.
  double length() const noexcept { return last() - first(); }
  double first() const noexcept {
    double time = 0;
    bool seen = false;
    for (auto const& actions : stages)
      for (auto const& a : actions)
        if (!seen || a.begin < time) time = a.begin, seen = true;
    return time;
  }
  double last() const noexcept {
    double time = 0;
    bool seen = false;
    for (auto const& actions : stages)
      for (auto const& a : actions)
        if (!seen || a.end > time) time = a.end, seen = true;
    return time;
  }

  /// Time that the stage computes.
  double busy(int stage) const {
    double time = 0;
    for (auto const& a : stages[static_cast<std::size_t>(stage)])
      if (computes(a.what.kind)) time += a.end - a.begin;
    return time;
  }

  /// The share of all stages' time in which they do not compute: (p - 1) / (m + p - 1) for GPipe and 1F1B.
  double bubble_share() const {
    auto const all = length() * static_cast<double>(stages.size());
    if (!(all > 0)) return 0;
    double idle = all;
    for (int stage = 0; static_cast<std::size_t>(stage) < stages.size(); ++stage) idle -= busy(stage);
    return idle / all;
  }

  /// The most micro-batches (with chunks: pairs of micro-batch and chunk) that a stage holds at once, from
  /// their forward until their backward's last half.
  int most_live(int stage) const {
    int live = 0, most = 0;
    for (auto const& a : stages[static_cast<std::size_t>(stage)]) {
      if (a.what.kind == action_kind::forward && ++live > most) most = live;
      if (a.what.kind == action_kind::backward || a.what.kind == action_kind::backward_weights) --live;
    }
    return most;
  }
};

struct simulation_options {
  /// Messages of one kind from one stage to another that may be sent and not received; 0 for any number.
  int in_flight = 2;
};

namespace detail {

/// How often a schedule has an action, by kind, micro-batch and chunk.
class action_counts {
public:
  action_counts(schedule const& plan, int stage, site where) : plan_(plan), stage_(stage) {
    auto const shape = plan.shape;
    places_.resize(static_cast<std::size_t>(action_kinds) * static_cast<std::size_t>(shape.micro_batches) *
                       static_cast<std::size_t>(shape.chunks),
                   none);
    auto const& list = plan.actions[static_cast<std::size_t>(stage)];
    for (std::size_t i = 0; i < list.size(); ++i) {
      auto const a = list[i];
      if (a.micro_batch < 0 || a.micro_batch >= shape.micro_batches || a.chunk < 0 || a.chunk >= shape.chunks)
        throw config_error("E-layout-042", where, "stage ", stage, " has a ", text_of(a), "; there are ",
                           shape.micro_batches, " micro-batches and ", shape.chunks, " chunks");
      auto& place = places_[index(a)];
      if (place != none)
        throw config_error("E-layout-043", where, "stage ", stage, " does the ", text_of(a), " twice");
      place = static_cast<std::ptrdiff_t>(i);
    }
  }

  bool has(action a) const { return places_[index(a)] != none; }
  std::ptrdiff_t place(action a) const { return places_[index(a)]; }

  void require(action a, bool wanted, site where) const {
    if (has(a) == wanted) return;
    if (wanted) throw config_error("E-layout-043", where, "stage ", stage_, " lacks the ", text_of(a));
    throw config_error("E-layout-042", where, "stage ", stage_, " has a ", text_of(a),
                       ", which nobody is the other end of, or which its other actions do already");
  }
  void require_order(action first, action second, site where) const {
    if (has(first) && has(second) && place(first) > place(second))
      throw config_error("E-layout-044", where, "stage ", stage_, " does the ", text_of(second),
                         " before the ", text_of(first));
  }

private:
  static constexpr std::ptrdiff_t none = -1;
  std::size_t index(action a) const noexcept {
    auto const shape = plan_.shape;
    return (static_cast<std::size_t>(a.kind) * static_cast<std::size_t>(shape.chunks) +
            static_cast<std::size_t>(a.chunk)) *
               static_cast<std::size_t>(shape.micro_batches) +
           static_cast<std::size_t>(a.micro_batch);
  }

  schedule const& plan_;
  int stage_;
  std::vector<std::ptrdiff_t> places_;
};

/// What one micro-batch needs in one chunk, and in which order.
inline void check_part(schedule const& plan, action_counts const& found, int stage, int micro_batch,
                       int chunk, site where) {
  using enum action_kind;
  auto const of = [&](action_kind kind) { return action{kind, micro_batch, chunk}; };
  bool const before = plan.has_before(stage, chunk), after = plan.has_after(stage, chunk);
  bool const halves = found.has(of(backward_input)) || found.has(of(backward_weights));
  found.require(of(forward), true, where);
  found.require(of(backward), !halves, where);
  found.require(of(backward_input), halves, where);
  found.require(of(backward_weights), halves, where);
  found.require(of(receive_activation), before, where);
  found.require(of(send_gradient), before, where);
  found.require(of(send_activation), after, where);
  found.require(of(receive_gradient), after, where);

  auto const first_half = of(halves ? backward_input : backward);
  found.require_order(of(receive_activation), of(forward), where);
  found.require_order(of(forward), of(send_activation), where);
  found.require_order(of(forward), of(receive_gradient), where);
  found.require_order(of(forward), first_half, where);
  found.require_order(of(receive_gradient), first_half, where);
  found.require_order(first_half, of(send_gradient), where);
  found.require_order(first_half, of(backward_weights), where);
  if (plan.shape.stages == 1 && chunk > 0) { // no message says so
    found.require_order({forward, micro_batch, chunk - 1}, of(forward), where);
    for (auto kind : {backward, backward_input})
      for (auto later : {backward, backward_input})
        found.require_order({later, micro_batch, chunk}, {kind, micro_batch, chunk - 1}, where);
  }
  if (micro_batch > 0)
    for (int kind = 0; kind < action_kinds; ++kind) {
      auto const a = of(static_cast<action_kind>(kind));
      found.require_order({a.kind, micro_batch - 1, chunk}, a, where);
    }
}

/// Runs the lists of a complete schedule with a clock.
template <action_durations Durations>
class schedule_clock {
public:
  schedule_clock(schedule const& plan, Durations const& durations, int in_flight)
      : plan_(plan), durations_(durations), in_flight_(in_flight), stages_(plan.actions.size()),
        channels_(2 * stages_ * stages_), next_(stages_), time_(stages_) {
    timeline_.stages.resize(stages_);
  }

  schedule_timeline run(site where) {
    for (bool moved = true; moved;) {
      moved = false;
      for (std::size_t stage = 0; stage < stages_; ++stage)
        while (next_[stage] < plan_.actions[stage].size() && step(stage, where)) moved = true;
    }
    std::string waits;
    for (std::size_t stage = 0; stage < stages_; ++stage)
      if (auto const at = next_[stage]; at < plan_.actions[stage].size()) {
        auto const a = plan_.actions[stage][at];
        waits += tessera::text_of(waits.empty() ? "" : ", ", "stage ", stage, " in its ", text_of(a),
                                  sends(a.kind) ? " to" : " from", " stage ", peer(stage, a).stage);
      }
    if (!waits.empty()) throw config_error("E-layout-045", where, "stages wait for each other: ", waits);
    return static_cast<schedule_timeline&&>(timeline_);
  }

private:
  struct message {
    action as_received;
    double arrives = 0;
  };
  /// The messages of one kind from one stage to another, in order.
  struct channel {
    std::vector<message> sent;
    std::vector<double> received;
  };

  schedule_peer peer(std::size_t stage, action a) const noexcept {
    return plan_.peer_of(narrow<int>(stage), a);
  }
  channel& between(std::size_t from, std::size_t to, bool gradient) noexcept {
    return channels_[(from * stages_ + to) * 2 + (gradient ? 1 : 0)];
  }

  /// Does the stage's next action; false while it has to wait.
  bool step(std::size_t stage, site where) {
    auto const a = plan_.actions[stage][next_[stage]];
    auto const begin = time_[stage];
    auto end = begin;
    if (computes(a.kind)) {
      end += durations_(narrow<int>(stage), a);
    } else if (sends(a.kind)) {
      bool const gradient = a.kind == action_kind::send_gradient;
      auto const to = peer(stage, a);
      auto& c = between(stage, static_cast<std::size_t>(to.stage), gradient);
      if (in_flight_ > 0 && c.sent.size() >= static_cast<std::size_t>(in_flight_)) {
        auto const earlier = c.sent.size() - static_cast<std::size_t>(in_flight_);
        if (earlier >= c.received.size()) return false;
        if (c.received[earlier] > end) end = c.received[earlier];
      }
      auto const kind = gradient ? action_kind::receive_gradient : action_kind::receive_activation;
      c.sent.push_back({{kind, a.micro_batch, to.chunk}, end + durations_(narrow<int>(stage), a)});
    } else {
      auto const from = static_cast<std::size_t>(peer(stage, a).stage);
      auto& c = between(from, stage, a.kind == action_kind::receive_gradient);
      if (c.received.size() == c.sent.size()) return false;
      auto const& m = c.sent[c.received.size()];
      if (!(m.as_received == a))
        throw config_error("E-layout-044", where, "stage ", stage, " waits for the ", text_of(a),
                           " from stage ", from, ", which sends that of micro-batch ",
                           m.as_received.micro_batch, " in chunk ", m.as_received.chunk, " first");
      if (m.arrives > end) end = m.arrives;
      c.received.push_back(end);
    }
    timeline_.stages[stage].push_back({a, begin, end});
    time_[stage] = end;
    ++next_[stage];
    return true;
  }

  schedule const& plan_;
  Durations const& durations_;
  int in_flight_;
  std::size_t stages_;
  std::vector<channel> channels_;
  std::vector<std::size_t> next_;
  std::vector<double> time_;
  schedule_timeline timeline_;
};

} // namespace detail

/// The timeline of `plan`. Throws config_error where the plan is not one: an action that is unknown
/// (E-layout-042), missing or done twice (E-layout-043), out of order (E-layout-044); or where stages would
/// wait for each other for ever (E-layout-045), naming each and what it waits for.
template <action_durations Durations = schedule_durations>
schedule_timeline simulate(schedule const& plan, Durations const& durations = {},
                           simulation_options options = {}, site where = site::here()) {
  auto const shape = plan.shape;
  if (shape.stages < 1 || shape.micro_batches < 1 || shape.chunks < 1 ||
      plan.actions.size() != static_cast<std::size_t>(shape.stages))
    throw config_error("E-layout-040", where, "a schedule of ", shape.stages, " stages, ",
                       shape.micro_batches, " micro-batches and ", shape.chunks, " chunks a stage with ",
                       plan.actions.size(), " lists of actions: each needs 1 or more, and each stage a list");
  for (int stage = 0; stage < shape.stages; ++stage) {
    detail::action_counts const found(plan, stage, where);
    for (int chunk = 0; chunk < shape.chunks; ++chunk)
      for (int m = 0; m < shape.micro_batches; ++m) detail::check_part(plan, found, stage, m, chunk, where);
  }
  return detail::schedule_clock<Durations>(plan, durations, options.in_flight).run(where);
}

} // namespace tessera::inline TESSERA_ABI::layout

#endif
