/// What ZeRO keeps on one rank, worked out before anything is allocated: the same figures
/// that the memory meter shows afterwards, and, beside them, what the ZeRO formula says (Rajbhandari et al.,
/// "ZeRO: memory optimizations toward training trillion parameter models", 2020).
///
///     auto plan = parallel::plan_memory(
///         units, {.ranks = 4, .zero = 1, .weight_bytes = 2, .gradient_bytes = 4, .state_bytes = 12});
///     plan.optimizer_state;      // bytes on rank 0
#ifndef TESSERA_PARALLEL_MEMORY_PLAN_HPP
#define TESSERA_PARALLEL_MEMORY_PLAN_HPP

#include <span>

#include <tessera/core/memory.hpp>
#include <tessera/layout/ownership.hpp>

namespace tessera::inline TESSERA_ABI::parallel {

/// Bytes by kind.
struct memory_plan {
  index_t parameters = 0;
  index_t gradients = 0;
  index_t optimizer_state = 0;
  index_t communication = 0; ///< An upper bound; the others are exact.

  constexpr index_t total() const noexcept {
    return parameters + gradients + optimizer_state + communication;
  }
  constexpr index_t of(memory_kind kind) const noexcept {
    switch (kind) {
    case memory_kind::parameters:
      return parameters;
    case memory_kind::gradients:
      return gradients;
    case memory_kind::optimizer_state:
      return optimizer_state;
    case memory_kind::communication:
      return communication;
    default:
      return 0;
    }
  }
};

struct memory_plan_options {
  int rank = 0;
  int ranks = 1;
  int zero = 0;
  index_t weight_bytes = 4;   ///< sizeof of the weights' storage type.
  index_t gradient_bytes = 4; ///< sizeof of the gradients' storage type.
  index_t state_bytes = 8;    ///< Optimizer state of an element: Optimizer::state_bytes(options).
};

/// The part of a unit's block of which a rank keeps something that stage `shared_from` and those after it
/// share: all of it before that stage, what it owns from there on.
constexpr layout::range kept_part(index_t block_size, layout::ownership who, int zero, int shared_from) {
  return zero < shared_from ? layout::range{0, block_size} : who.of(block_size);
}
/// Optimizer state is shared from stage 1 on, gradients from stage 2 on, weights at stage 3.
constexpr layout::range kept_state(index_t block_size, layout::ownership who, int zero) {
  return kept_part(block_size, who, zero, 1);
}
constexpr layout::range kept_gradients(index_t block_size, layout::ownership who, int zero) {
  return kept_part(block_size, who, zero, 2);
}
constexpr layout::range kept_weights(index_t block_size, layout::ownership who, int zero) {
  return kept_part(block_size, who, zero, 3);
}

/// Exact for the elements of `units`, gaps of alignment included, all of them trained. Communication depends
/// on the communicator and is left at 0 here: zero::plan adds it.
inline memory_plan plan_memory(std::span<layout::range const> units, memory_plan_options const& o) {
  memory_plan plan;
  layout::ownership const who{o.rank, o.ranks};
  for (auto const& unit : units) {
    plan.parameters += kept_weights(unit.size(), who, o.zero).size() * o.weight_bytes;
    plan.gradients += kept_gradients(unit.size(), who, o.zero).size() * o.gradient_bytes;
    plan.optimizer_state += kept_state(unit.size(), who, o.zero).size() * o.state_bytes;
  }
  return plan;
}

/// The formulas for n parameters: with 16-bit weights and gradients and AdamW 16 n bytes on one rank, and on
/// N ranks (4 + 12 / N) n at stage 1, (2 + 14 / N) n at stage 2, 16 n / N at stage 3.
constexpr double zero_formula_bytes(index_t n, memory_plan_options const& o) noexcept {
  auto const a_rank = [&](index_t bytes, int shared_from) {
    return static_cast<double>(bytes) / (o.zero < shared_from ? 1 : o.ranks);
  };
  return static_cast<double>(n) *
         (a_rank(o.weight_bytes, 3) + a_rank(o.gradient_bytes, 2) + a_rank(o.state_bytes, 1));
}

} // namespace tessera::inline TESSERA_ABI::parallel

#endif
