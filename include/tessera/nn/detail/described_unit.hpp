/// The part of a unit that is the same for all: its name and its parameter map, and the check of what is
/// lent.
#ifndef TESSERA_NN_DETAIL_DESCRIBED_UNIT_HPP
#define TESSERA_NN_DETAIL_DESCRIBED_UNIT_HPP

#include <vector>

#include <tessera/nn/detail/parameter_views.hpp>
#include <tessera/nn/detail/pieces.hpp>
#include <tessera/nn/unit.hpp>

namespace tessera::inline TESSERA_ABI::nn::detail {

/// `Pieces` is what a training forward keeps for its backward, one for each micro-batch in flight.
template <exec::space Ex, storage_scalar T, storage_scalar G, std::default_initializable Pieces>
class described_unit : public unit<Ex, T, G> {
public:
  using typename unit<Ex, T, G>::blocks;

  std::string const& name() const override { return name_; }
  layout::parameter_map const& parameters() const override { return map_; }
  std::string const& tied_to() const override { return tied_to_; }

  void reserve(int micro_batches) override {
    if (micro_batches < 1)
      throw config_error("E-nn-011", site::here(), name_, ": ", micro_batches,
                         " micro-batches in flight were reserved, need 1 or more");
    slots_.resize(static_cast<std::size_t>(micro_batches));
  }

  // Of a unit that keeps nothing it could compute again, and does all of its backward at once.
  void recompute(recomputation) override {}
  index_t kept_for_weights_bytes(batch_shape) const override { return 0; }

protected:
  explicit described_unit(std::string name, std::string tied_to = {})
      : name_(static_cast<std::string&&>(name)), tied_to_(static_cast<std::string&&>(tied_to)), slots_(1) {}

  /// Where micro-batch p.slot keeps its pieces.
  Pieces& slot(pass const& p) {
    if (p.slot < 0 || static_cast<std::size_t>(p.slot) >= slots_.size())
      throw config_error("E-nn-012", site::here(), name_, ": micro-batch slot ", p.slot, " of ",
                         slots_.size(), " reserved; call reserve with more");
    return slots_[static_cast<std::size_t>(p.slot)];
  }

  void check_weights(blocks const& lent) const { check("weights", lent.weights.size()); }
  void check_only_gradients(blocks const& lent) const { check("gradients", lent.gradients.size()); }
  void check_gradients(blocks const& lent) const {
    check_weights(lent);
    check_only_gradients(lent);
  }

  layout::parameter_map map_;

private:
  void check(char const* what, std::size_t elements) const {
    if (static_cast<index_t>(elements) != map_.block_size())
      throw size_error("E-nn-010", site::here(), name_, ": the block of ", what, " has ", elements,
                       " elements, its parameter map has ", map_.block_size());
  }

  std::string name_, tied_to_;
  std::vector<Pieces> slots_;
};

} // namespace tessera::inline TESSERA_ABI::nn::detail

#endif
