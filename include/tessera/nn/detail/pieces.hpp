/// One list of activation pieces serves two readers: `take` from the arena, or from an arena_plan that only
/// adds up, so that the plan cannot forget what the forward takes.
#ifndef TESSERA_NN_DETAIL_PIECES_HPP
#define TESSERA_NN_DETAIL_PIECES_HPP

#include <tessera/core/arena.hpp>

namespace tessera::inline TESSERA_ABI::nn::detail {

/// Takes like an arena, hands out views without memory, and knows the bytes.
template <memory_space Memory>
class arena_plan {
public:
  template <class T, int Rank>
  view<T, Rank, Memory> take(extents<Rank> const& sizes, site where = site::here()) {
    bytes_ += arena<Memory>::template bytes_for<T>(element_count(sizes, where));
    return {static_cast<T*>(nullptr), sizes};
  }
  index_t bytes() const noexcept { return bytes_; }

private:
  index_t bytes_ = 0;
};

/// What pieces are taken from: an arena or its plan.
template <class A, class Memory>
concept piece_source = std::same_as<A, arena<Memory>> || std::same_as<A, arena_plan<Memory>>;

/// The bytes of whatever `take(source)` takes.
template <memory_space Memory, std::invocable<arena_plan<Memory>&> Take>
index_t planned_bytes(Take&& take) {
  arena_plan<Memory> plan;
  take(plan);
  return plan.bytes();
}

} // namespace tessera::inline TESSERA_ABI::nn::detail

#endif
