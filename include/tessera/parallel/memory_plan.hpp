/// What data parallel training keeps on one rank, worked out before anything is allocated: the same figures
/// that the memory meter shows afterwards, and, beside them, what the ZeRO formula says (Rajbhandari et al.,
/// "ZeRO: memory optimizations toward training trillion parameter models", 2020).
///
///     auto plan = parallel::plan_memory(units, {.ranks = 4, .zero = 1, .weight_bytes = 2, .gradient_bytes =
///     4,
///                                               .state_bytes = 12});
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

/// The part of a unit's block whose optimizer state a rank keeps: all of it at stage 0, what it owns from
/// stage 1 on.
constexpr layout::range kept_state(index_t block_size, layout::ownership who, int zero) {
  return zero == 0 ? layout::range{0, block_size} : who.of(block_size);
}

/// Exact for the elements of `units`, gaps of alignment included. Communication depends on the communicator
/// and is left at 0 here: data_parallel::plan adds it.
inline memory_plan plan_memory(std::span<layout::range const> units, memory_plan_options const& o) {
  memory_plan plan;
  for (auto const& unit : units) {
    plan.parameters += unit.size() * o.weight_bytes;
    plan.gradients += unit.size() * o.gradient_bytes;
    plan.optimizer_state += kept_state(unit.size(), {o.rank, o.ranks}, o.zero).size() * o.state_bytes;
  }
  return plan;
}

/// The formula: weights + gradients + state / ranks, for each of n parameters: with bf16 weights and AdamW
/// (2 + g + 12 / N) n bytes at stage 1.
constexpr double zero_formula_bytes(index_t n, memory_plan_options const& o) noexcept {
  auto const state = static_cast<double>(o.state_bytes) / (o.zero == 0 ? 1 : o.ranks);
  return static_cast<double>(n) * (static_cast<double>(o.weight_bytes + o.gradient_bytes) + state);
}

} // namespace tessera::inline TESSERA_ABI::parallel

#endif
