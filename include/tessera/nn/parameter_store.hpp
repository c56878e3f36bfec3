/// Every parameter of a model in one contiguous buffer, and their gradients in another of the same shape:
/// unit i's block is the stretch unit_range(i) of both. Reducing, clipping, updating and saving are then each
/// one pass over contiguous memory, of all units or of some.
///
///     auto units = make_transformer<exec::host, bf16, float>(config);
///     parameter_store<exec::host, bf16, float> store(units, {.meter = &meter});
///     store.weights(i);  store.gradients(i);  store.lend(i);      // what unit i's forward and backward take
#ifndef TESSERA_NN_PARAMETER_STORE_HPP
#define TESSERA_NN_PARAMETER_STORE_HPP

#include <tessera/core/tensor.hpp>
#include <tessera/nn/unit.hpp>

namespace tessera::inline TESSERA_ABI::nn {

struct store_options {
  memory_meter* meter = nullptr;
  bool gradients = true; ///< False where nothing is trained.
};

template <exec::space Ex, storage_scalar T, storage_scalar G>
class parameter_store {
public:
  using memory = typename Ex::memory;
  using blocks = typename unit<Ex, T, G>::blocks;

  /// Zeros for all parameters of `units`. Throws config_error where two parameters or units share a name, or
  /// a unit is tied to one that does not come before it.
  explicit parameter_store(unit_list<Ex, T, G> const& units, store_options options = {},
                           site where = site::here()) {
    index_t end = 0;
    for (auto const& u : units) {
      for (auto const& earlier : entries_) require_distinct(earlier, *u, where);
      auto const begin = end;
      end += u->parameters().block_size();
      entries_.push_back({u->name(), u->parameters(), {begin, end}, none});
      if (!u->tied_to().empty()) entries_.back().tied = find(u->tied_to(), entries_.size() - 1, where);
    }
    weights_ = tensor<T, 1, memory>({end}, {options.meter, memory_kind::parameters}, where);
    if (options.gradients)
      gradients_ = tensor<G, 1, memory>({end}, {options.meter, memory_kind::gradients}, where);
  }

  std::size_t units() const noexcept { return entries_.size(); }
  /// Where unit `i` stands in weights() and gradients().
  layout::range unit_range(std::size_t i) const { return entries_[i].where; }
  std::string const& unit_name(std::size_t i) const { return entries_[i].name; }
  layout::parameter_map const& parameters(std::size_t i) const { return entries_[i].map; }

  /// Elements of the whole buffer, the gaps of alignment included; parameter_count leaves them out.
  index_t size() const noexcept { return weights_.size(); }
  index_t parameter_count() const noexcept {
    index_t count = 0;
    for (auto const& e : entries_) count += e.map.parameter_count();
    return count;
  }
  bool has_gradients() const noexcept { return gradients_.size() == weights_.size(); }

  memory_span<T, memory> weights() noexcept { return weights_.span(); }
  memory_span<T const, memory> weights() const noexcept { return weights_.span(); }
  memory_span<G, memory> gradients() noexcept { return gradients_.span(); }
  memory_span<G const, memory> gradients() const noexcept { return gradients_.span(); }

  memory_span<T, memory> weights(std::size_t i) noexcept { return part(weights(), i); }
  memory_span<T const, memory> weights(std::size_t i) const noexcept { return part(weights(), i); }
  /// Empty where the store holds no gradients.
  memory_span<G, memory> gradients(std::size_t i) noexcept { return part(gradients(), i); }
  memory_span<G const, memory> gradients(std::size_t i) const noexcept { return part(gradients(), i); }

  /// Everything that unit `i` works on.
  blocks lend(std::size_t i) noexcept {
    blocks lent{weights(i), gradients(i), {}, {}};
    if (auto const tied = entries_[i].tied; tied != none) {
      lent.tied_weights = weights(tied);
      lent.tied_gradients = gradients(tied);
    }
    return lent;
  }

  /// Calls f(parameter, range of the whole buffer) for every parameter, in order.
  template <std::invocable<layout::parameter const&, layout::range> F>
  void for_each(F&& f) const {
    for (auto const& e : entries_)
      for (auto const& p : e.map)
        f(p, layout::range{e.where.begin + p.offset, e.where.begin + p.where().end});
  }

private:
  static constexpr auto none = static_cast<std::size_t>(-1);

  struct entry {
    std::string name;
    layout::parameter_map map;
    layout::range where;
    std::size_t tied; ///< Number of the unit whose block this one reads too.
  };

  static void require_distinct(entry const& earlier, unit<Ex, T, G> const& later, site where) {
    if (earlier.name == later.name())
      throw config_error("E-nn-014", where, "two units are named ", earlier.name);
    for (auto const& a : earlier.map)
      for (auto const& b : later.parameters())
        if (a.name == b.name)
          throw config_error("E-nn-014", where, "units ", earlier.name, " and ", later.name(),
                             " both have a parameter ", a.name);
  }

  std::size_t find(std::string const& name, std::size_t before, site where) const {
    for (std::size_t i = 0; i < before; ++i)
      if (entries_[i].name == name) return i;
    throw config_error("E-nn-015", where, "unit ", entries_.back().name, " is tied to ", name,
                       ", which is not among the units before it");
  }

  template <span_in<memory> Block>
  Block part(Block all, std::size_t i) const noexcept {
    auto const where = entries_[i].where;
    if (all.empty()) return {};
    return all.subspan(static_cast<std::size_t>(where.begin), static_cast<std::size_t>(where.size()));
  }

  std::vector<entry> entries_;
  tensor<T, 1, memory> weights_;
  tensor<G, 1, memory> gradients_;
};

} // namespace tessera::inline TESSERA_ABI::nn

#endif
