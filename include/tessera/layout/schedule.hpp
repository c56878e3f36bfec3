/// Pipeline schedules as data: for each stage the list of its actions in the order in which it does them.
/// Nothing here communicates or computes; layout/schedule_simulator.hpp checks a list before it runs, and
/// parallel/pipeline.hpp runs it.
///
///     auto plan = make_schedule(schedule_kind::one_forward_one_backward, {.stages = 4, .micro_batches = 8});
///     for (auto a : plan.actions[stage]) std::puts(text_of(a).c_str());  // "forward of micro-batch 0", ...
///
/// A stage holds `chunks` ranges of the model's units; chunk c of stage s is part c * stages + s of the
/// model, so that a micro-batch goes round the stages once for each chunk.
///
/// Whatever the schedule, the micro-batches of a part are worked on in ascending order, so that gradients are
/// added in the same order and have the same bits under all schedules.
///
/// Sources: GPipe (arXiv:1811.06965); 1F1B and its interleaved form (arXiv:2104.04473); ZB-H1
/// (arXiv:2401.10241).
#ifndef TESSERA_LAYOUT_SCHEDULE_HPP
#define TESSERA_LAYOUT_SCHEDULE_HPP

#include <cstdint>
#include <vector>

#include <tessera/core/error.hpp>

namespace tessera::inline TESSERA_ABI::layout {

enum class action_kind : std::uint8_t {
  forward,
  backward,         ///< Gradients of the input and of the weights.
  backward_input,   ///< The first half of `backward`: what the stage before waits for.
  backward_weights, ///< The second half, which nobody waits for.
  send_activation,  ///< To the next part of the model.
  receive_activation,
  send_gradient, ///< To the part before.
  receive_gradient
};
inline constexpr int action_kinds = 8;

constexpr char const* name_of(action_kind kind) noexcept {
  constexpr char const* names[] = {"forward",          "backward",        "backward_input",
                                   "backward_weights", "send_activation", "receive_activation",
                                   "send_gradient",    "receive_gradient"};
  return names[static_cast<int>(kind)];
}

/// Computes, rather than sends or receives.
constexpr bool computes(action_kind kind) noexcept {
  return kind <= action_kind::backward_weights;
}
constexpr bool sends(action_kind kind) noexcept {
  return kind == action_kind::send_activation || kind == action_kind::send_gradient;
}
constexpr bool receives(action_kind kind) noexcept {
  return kind == action_kind::receive_activation || kind == action_kind::receive_gradient;
}

struct action {
  action_kind kind = action_kind::forward;
  int micro_batch = 0;
  int chunk = 0; ///< Of the stage that does it, for messages too.

  friend constexpr bool operator==(action const&, action const&) = default;
};

inline std::string text_of(action a) {
  return tessera::text_of(name_of(a.kind), " of micro-batch ", a.micro_batch, " in chunk ", a.chunk);
}

enum class schedule_kind : std::uint8_t {
  /// All forwards, then all backwards: keeps every micro-batch's activations at once.
  gpipe,
  /// Backwards begin as soon as they can: stage s of p keeps at most p - s micro-batches.
  one_forward_one_backward,
  /// Several chunks a stage: the idle time is divided by their number, messages are multiplied by it.
  interleaved_one_forward_one_backward,
  /// ZB-H1: 1F1B with each backward split, its weight half moved to where the stage would be idle. Every
  /// stage keeps what the first stage of 1F1B does.
  zero_bubble
};

constexpr char const* name_of(schedule_kind kind) noexcept {
  constexpr char const* names[] = {"gpipe", "one_forward_one_backward",
                                   "interleaved_one_forward_one_backward", "zero_bubble"};
  return names[static_cast<int>(kind)];
}

struct schedule_shape {
  int stages = 1;
  int micro_batches = 1; ///< May be fewer than stages.
  int chunks = 1;        ///< Parts of the model on each stage.
};

/// Where a message comes from or goes to.
struct schedule_peer {
  int stage = 0;
  int chunk = 0; ///< Of that stage.
};

struct schedule {
  schedule_shape shape;
  std::vector<std::vector<action>> actions; ///< One list a stage.

  constexpr int parts() const noexcept { return shape.stages * shape.chunks; }
  constexpr int part_of(int stage, int chunk) const noexcept { return chunk * shape.stages + stage; }

  /// Whether the part exchanges activations (and, the other way, gradients) with the part before, or after
  /// it. On a single stage parts hand over to each other without messages.
  constexpr bool has_before(int stage, int chunk) const noexcept {
    return shape.stages > 1 && part_of(stage, chunk) > 0;
  }
  constexpr bool has_after(int stage, int chunk) const noexcept {
    return shape.stages > 1 && part_of(stage, chunk) + 1 < parts();
  }

  /// The other end of message `a` of `stage`.
  constexpr schedule_peer peer_of(int stage, action a) const noexcept {
    bool const after = a.kind == action_kind::send_activation || a.kind == action_kind::receive_gradient;
    auto const part = part_of(stage, a.chunk) + (after ? 1 : -1);
    return {part % shape.stages, part / shape.stages};
  }
};

namespace detail {

/// The n-th of the (micro-batch, chunk) pairs in the order of their forwards: groups of `stages`
/// micro-batches go through a stage's chunks one chunk after another. The backwards take the chunks from the
/// last to the first.
constexpr action in_order(schedule_shape shape, int n, bool backwards) noexcept {
  auto const group = shape.stages * shape.chunks;
  auto const chunk = n % group / shape.stages;
  return {backwards ? action_kind::backward : action_kind::forward,
          n / group * shape.stages + n % shape.stages, backwards ? shape.chunks - 1 - chunk : chunk};
}

/// How many forwards stage `stage` is ahead of its backwards. Enough for the first backward to be there when
/// the stage wants it: a forward of each later stage and a backward back again, one pair in two steps; with
/// chunks, after all but the last chunk of the first group.
constexpr int forwards_ahead(schedule_kind kind, schedule_shape shape, int stage, int all) noexcept {
  auto const later = shape.stages - 1 - stage;
  auto const ahead = kind == schedule_kind::gpipe ? all - 1
                     : kind == schedule_kind::interleaved_one_forward_one_backward
                         ? 2 * later + (shape.chunks - 1) * shape.stages
                         : later;
  return ahead < all - 1 ? ahead : all - 1;
}

/// Appends a computation with the messages that belong to it. Micro-batches that only fill the last group of
/// an interleaved schedule are left out: a list without them has no wait that the list with them had not.
inline void append_with_messages(schedule& plan, int stage, action a) {
  if (a.micro_batch >= plan.shape.micro_batches) return;
  auto& list = plan.actions[static_cast<std::size_t>(stage)];
  auto const message = [&](bool wanted, action_kind kind) {
    if (wanted) list.push_back({kind, a.micro_batch, a.chunk});
  };
  bool const forward = a.kind == action_kind::forward, weights = a.kind == action_kind::backward_weights;
  bool const before = plan.has_before(stage, a.chunk), after = plan.has_after(stage, a.chunk);
  message(forward && before, action_kind::receive_activation);
  message(!forward && !weights && after, action_kind::receive_gradient);
  list.push_back(a);
  message(forward && after, action_kind::send_activation);
  message(!forward && !weights && before, action_kind::send_gradient);
}

} // namespace detail

/// The one generator. All schedules are a row of forwards and a row of backwards, the second some places
/// behind the first; how many places, and whether the weights' half of a backward comes later still, is what
/// tells them apart.
/// Throws config_error for counts below 1, and for chunks where `kind` has none or too few.
inline schedule make_schedule(schedule_kind kind, schedule_shape shape, site where = site::here()) {
  if (shape.stages < 1 || shape.micro_batches < 1 || shape.chunks < 1)
    throw config_error("E-layout-040", where, "a schedule of ", shape.stages, " stages, ",
                       shape.micro_batches, " micro-batches and ", shape.chunks,
                       " chunks a stage: each needs 1 or more");
  bool const interleaved = kind == schedule_kind::interleaved_one_forward_one_backward;
  if (interleaved != (shape.chunks > 1))
    throw config_error("E-layout-041", where, name_of(kind), " with ", shape.chunks, " chunks a stage: ",
                       interleaved ? "it needs 2 or more, or take one_forward_one_backward"
                                   : "only interleaved_one_forward_one_backward has more than 1");

  schedule plan{shape, std::vector<std::vector<action>>(static_cast<std::size_t>(shape.stages))};
  auto const groups = (shape.micro_batches + shape.stages - 1) / shape.stages;
  auto const all = interleaved ? groups * shape.stages * shape.chunks : shape.micro_batches;
  for (int stage = 0; stage < shape.stages; ++stage) {
    auto const ahead = detail::forwards_ahead(kind, shape, stage, all);
    auto const halves = kind == schedule_kind::zero_bubble;
    auto const append = [&](int n, bool backwards, action_kind as) {
      if (n < 0 || n >= all) return;
      auto a = detail::in_order(shape, n, backwards);
      a.kind = as;
      detail::append_with_messages(plan, stage, a);
    };
    // A later stage begins later and keeps fewer micro-batches: its weights' halves may wait longer.
    for (int n = 0; n < all + ahead + (halves ? stage : 0); ++n) {
      append(n, false, action_kind::forward);
      append(n - ahead, true, halves ? action_kind::backward_input : action_kind::backward);
      if (halves) append(n - ahead - stage, true, action_kind::backward_weights);
    }
  }
  return plan;
}

} // namespace tessera::inline TESSERA_ABI::layout

#endif
