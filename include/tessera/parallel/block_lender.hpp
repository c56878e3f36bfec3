/// Who lends units their weights and gradients while a runner runs them (parallel/unit_runner.hpp). ZeRO is a
/// lender that gathers before it lends and reduces afterwards (parallel/zero.hpp); `store_lender` is the
/// plainest one, over an nn::parameter_store.
///
///     store_lender<Ex, T, G> lender(store);
///     auto lent = lender.lend(ex, u, {.next = u - 1, .micro_batch = i});
///     units[u]->backward(ex, lent, stream, arena, {.accumulate = lender.accumulates(i)});
///     lender.done(u);
///     lender.gradients_ready(ex, u, i + 1 == micro_batches);
#ifndef TESSERA_PARALLEL_BLOCK_LENDER_HPP
#define TESSERA_PARALLEL_BLOCK_LENDER_HPP

#include <tessera/nn/parameter_store.hpp>
#include <tessera/parallel/zero_options.hpp>

namespace tessera::inline TESSERA_ABI::parallel {

/// Semantics. One unit is lent at a time; all ranks that share blocks make the same calls in the same order.
/// - lend(ex, u, how): the blocks of the rank's unit u, and of the one it is tied to; weights and gradients
///   where how.weights and how.gradients ask for them. The weights of how.next will be lent next: a good time
///   to begin to gather them.
/// - accumulates(micro_batch): whether that micro-batch's gradients are to be added to those that are lent
///   (pass::accumulate), or overwrite them.
/// - done(u): the operations that use the weights lent have been given to `ex`; what was gathered may go.
/// - gradients_ready(ex, u, last): the micro-batch has made all of its gradients of u: for each unit once a
///   micro-batch, in ascending order; `last` with the last one of a step.
template <class L, class Ex, class T, class G>
concept block_lender = exec::space<Ex> && storage_scalar<T> && storage_scalar<G> &&
    requires(L& lender, Ex& ex, std::size_t u, lend_options how, index_t micro_batch, bool last) {
  { lender.lend(ex, u, how) } -> std::same_as<typename nn::unit<Ex, T, G>::blocks>;
  { lender.accumulates(micro_batch) } -> std::convertible_to<bool>;
  lender.done(u);
  lender.gradients_ready(ex, u, last);
};

/// All of a store's units are there all the time, and nobody shares them.
template <exec::space Ex, storage_scalar T, storage_scalar G>
class store_lender {
public:
  /// Borrows `store`.
  explicit store_lender(nn::parameter_store<Ex, T, G>& store) noexcept : store_(store) {}

  typename nn::unit<Ex, T, G>::blocks lend(Ex&, std::size_t u, lend_options) { return store_.lend(u); }
  bool accumulates(index_t micro_batch) const noexcept { return micro_batch > 0; }
  void done(std::size_t) noexcept {}
  void gradients_ready(Ex&, std::size_t, bool) noexcept {}

private:
  nn::parameter_store<Ex, T, G>& store_;
};

} // namespace tessera::inline TESSERA_ABI::parallel

#endif
