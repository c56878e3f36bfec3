/// What all ranks must agree on before a step is taken: the loss, the count, and the squares of the gradient.
#ifndef TESSERA_PARALLEL_DETAIL_STEP_SUMS_HPP
#define TESSERA_PARALLEL_DETAIL_STEP_SUMS_HPP

#include <algorithm>

#include <tessera/parallel/detail/zero_parts.hpp>
#include <tessera/parallel/global_norm.hpp>

namespace tessera::inline TESSERA_ABI::parallel::detail {

/// tree(0, n) = tree(0, h) + tree(h, n - h), with h the largest power of two below n: as
/// comm::summation::binary_tree.
inline nn::loss_sum tree_sum(std::span<nn::loss_sum const> losses) {
  if (losses.empty()) return {};
  if (losses.size() == 1) return losses[0];
  std::size_t half = 1;
  while (half < losses.size() - half) half *= 2;
  auto sum = tree_sum(losses.first(half));
  return sum += tree_sum(losses.subspan(half));
}

struct step_totals {
  nn::loss_sum loss;
  double squares = 0;
};

/// The same on every rank, bit by bit, like the totals.
struct step_decision {
  update_result result;
  double gradient_scale = 0; ///< What the optimizer multiplies gradients by.
};

/// The gradients are divided here, once, by the count of all ranks.
inline step_decision decide(step_totals const& totals, update_options const& how) {
  step_decision made{.result = {.loss = totals.loss}};
  auto const divisor = totals.loss.count * how.loss_scale;
  auto& norm = made.result.gradient_norm;
  if (totals.loss.count > 0) norm = std::sqrt(totals.squares) / divisor;
  made.result.applied = totals.loss.count > 0 && std::isfinite(totals.loss.sum) && std::isfinite(norm);
  if (made.result.applied) made.gradient_scale = clip_factor(norm, how.clip_norm) / divisor;
  return made;
}

/// Without the reproducible mode: one message of 24 bytes. With it: one of 8 bytes for each piece of each
/// unit among the gradient ranks, where each piece comes from one rank; then one of 8 bytes for each unit of
/// the model, where each comes from one stage; both are added up in one order.
template <comm::communicator Comm, exec::space Ex, storage_scalar G>
class step_sums {
public:
  step_sums(zero_ranks<Comm> const& ranks, layout::ownership who, std::vector<unit_part> const& parts,
            zero_options const& options, site where)
      : ranks_(ranks), parts_(parts), reproducible_(options.reproducible),
        first_replica_(ranks.replicas == nullptr || ranks.replicas->rank() == 0) {
    auto const tensor_rank = ranks.tensor == nullptr ? 0 : ranks.tensor->rank();
    for (std::size_t u = 0; first_replica_ && u < parts.size(); ++u) {
      auto const add = [&](layout::range within, std::size_t piece) {
        for (auto const& r : counted_in(parts[u], within, tensor_rank, options))
          stretches_.push_back({u, piece, {r.begin - parts[u].share.begin, r.end - parts[u].share.begin}});
      };
      if (!reproducible_) {
        add(who.of(parts[u].size), 0);
        continue;
      }
      auto const mine = who.pieces_of(who.rank);
      for (auto i = mine.begin; i < mine.end; ++i)
        add(who.piece(parts[u].size, i), static_cast<std::size_t>(i));
    }
    if (!reproducible_) return;
    index_t units = 0;
    for (auto const& part : parts) units = (std::max)(units, static_cast<index_t>(part.given.number) + 1);
    units = ranks.world.all_reduce(units, {.operation = comm::reduction::max}, where);
    pieces_.resize(2 + parts.size() * reproducible_pieces);
    units_.resize(2 + static_cast<std::size_t>(units));
  }

  /// `share(u)` is this rank's share of unit u's gradients.
  template <class Share>
  step_totals add_up(Ex& ex, std::span<nn::loss_sum const> losses, Share&& share, site where) {
    auto const squares = [&](stretch const& s) {
      return ops::sum_of_squares(
          ex, view<G const, 1, typename Ex::memory>(share(s.unit).data() + s.part.begin, {s.part.size()}),
          where);
    };
    if (!reproducible_) {
      double sums[3] = {};
      for (auto const& loss : losses) {
        sums[0] += loss.sum;
        sums[1] += loss.count;
      }
      for (auto const& s : stretches_) sums[2] += squares(s);
      ranks_.world.all_reduce(std::span<double>(sums), comm::reduce_options{}, where);
      return {{sums[0], sums[1]}, sums[2]};
    }
    auto const loss = tree_sum(losses);
    std::fill(pieces_.begin(), pieces_.end(), 0.0);
    pieces_[0] = loss.sum;
    pieces_[1] = loss.count;
    for (auto const& s : stretches_) pieces_[2 + s.unit * reproducible_pieces + s.piece] += squares(s);
    comm::reduce_options const tree{.order = comm::summation::binary_tree};
    ranks_.gradients.all_reduce(std::span<double>(pieces_), tree, where);
    if (ranks_.replicas != nullptr) ranks_.replicas->all_reduce(std::span<double>(pieces_), tree, where);

    std::fill(units_.begin(), units_.end(), 0.0);
    if (ranks_.gradients.rank() == 0 && first_replica_) {
      units_[0] = pieces_[0];
      units_[1] = pieces_[1];
      for (std::size_t u = 0; u < parts_.size(); ++u)
        for (std::size_t i = 0; i < reproducible_pieces; ++i)
          units_[2 + parts_[u].given.number] += pieces_[2 + u * reproducible_pieces + i];
    }
    ranks_.world.all_reduce(std::span<double>(units_), tree, where);
    step_totals totals{{units_[0], units_[1]}, 0};
    for (auto i = units_.size(); i-- > 2;) totals.squares += units_[i];
    return totals;
  }

private:
  struct stretch {
    std::size_t unit, piece;
    layout::range part; ///< Of this rank's share.
  };

  zero_ranks<Comm> ranks_;
  std::vector<unit_part> const& parts_;
  bool reproducible_, first_replica_;
  std::vector<stretch> stretches_;
  std::vector<double> pieces_; ///< Loss, count, then the squares of each piece of each unit.
  std::vector<double> units_;  ///< Loss, count, then the squares of each unit of the model.
};

} // namespace tessera::inline TESSERA_ABI::parallel::detail

#endif
