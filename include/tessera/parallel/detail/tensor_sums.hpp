/// Adds up, over a tensor-parallel group, the gradients of which each rank has a summand: of norms under
/// sequence parallelism, and of key and value heads that several ranks share.
#ifndef TESSERA_PARALLEL_DETAIL_TENSOR_SUMS_HPP
#define TESSERA_PARALLEL_DETAIL_TENSOR_SUMS_HPP

#include <tessera/parallel/detail/zero_parts.hpp>

namespace tessera::inline TESSERA_ABI::parallel::detail {

/// The stretches of a unit's block that `copies` consecutive tensor ranks add up.
struct summed_stretches {
  int copies = 1;
  std::vector<layout::range> stretches;
};

/// Of a unit that is trained. In order; the same on all ranks that add them up.
inline std::vector<summed_stretches> summed_stretches_of(unit_part const& part) {
  std::vector<summed_stretches> found;
  if (!part.trained) return found;
  for (auto const& p : *part.given.map) {
    auto const copies = p.share.copies;
    if (!p.share.partial || copies == 1) continue;
    bool known = false;
    for (auto const& each : found) known = known || each.copies == copies;
    if (known) continue;
    auto stretches = stretches_of(*part.given.map, {0, part.size}, [&](layout::parameter const& other) {
      return other.share.partial && other.share.copies == copies;
    });
    found.push_back({copies, static_cast<std::vector<layout::range>&&>(stretches)});
  }
  return found;
}

template <comm::communicator Comm, storage_scalar G, memory_space Memory>
class tensor_sums {
public:
  /// Called by all ranks of `tensor`, which may be null. Throws config_error (E-parallel-011) where there are
  /// summands and nobody to add them up with.
  tensor_sums(Comm* tensor, std::vector<unit_part> const& parts, site where) {
    for (auto const& part : parts) {
      units_.push_back(summed_stretches_of(part));
      for (auto const& each : units_.back()) prepare(tensor, each.copies, where);
    }
  }

  /// Blocks. Cost: a message for each stretch.
  void add_up(memory_span<G, Memory> block, std::size_t u, site where) {
    for (auto const& each : units_[u])
      for (auto const& part : each.stretches)
        group_of(each.copies)
            .all_reduce(
                block.subspan(static_cast<std::size_t>(part.begin), static_cast<std::size_t>(part.size())),
                comm::reduce_options{}, where);
  }

private:
  struct group {
    int copies;
    Comm* comm;
  };

  void prepare(Comm* tensor, int copies, site where) {
    for (auto const& known : groups_)
      if (known.copies == copies) return;
    if (tensor == nullptr || tensor->size() % copies != 0)
      throw config_error("E-parallel-011", where, "zero: a parameter's gradient is added up over ", copies,
                         " tensor ranks, and ", tensor == nullptr ? 1 : tensor->size(),
                         " are in zero_ranks::tensor; give the group that the units were made for");
    if (copies == tensor->size()) return groups_.push_back({copies, tensor});
    if (split_.capacity() == 0) split_.reserve(32); // divisors of a group's size: addresses stay
    split_.push_back(tensor->split(tensor->rank() / copies, tensor->rank(), where));
    groups_.push_back({copies, &split_.back()});
  }
  Comm& group_of(int copies) {
    auto known = groups_.begin();
    while (known->copies != copies) ++known;
    return *known->comm;
  }

  std::vector<std::vector<summed_stretches>> units_;
  std::vector<group> groups_;
  std::vector<Comm> split_;
};

} // namespace tessera::inline TESSERA_ABI::parallel::detail

#endif
