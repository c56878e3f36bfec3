/// Brings what the ranks hold of one unit to rank 0 and puts the whole tensors together there.
#ifndef TESSERA_TRAIN_DETAIL_COLLECTED_UNIT_HPP
#define TESSERA_TRAIN_DETAIL_COLLECTED_UNIT_HPP

#include <algorithm>

#include <tessera/comm/communicator.hpp>
#include <tessera/core/tensor.hpp>
#include <tessera/exec/copy.hpp>
#include <tessera/train/model_parts.hpp>

namespace tessera::inline TESSERA_ABI::train::detail {

template <class Span>
Span part_of(Span all, layout::range part) {
  return all.subspan(static_cast<std::size_t>(part.begin), static_cast<std::size_t>(part.size()));
}

/// A stretch of a whole parameter, and where it stands among what came from the ranks.
struct collected_stretch {
  index_t parameter = 0; ///< Number in the map of the whole unit.
  index_t first = 0;     ///< Element of the whole parameter.
  index_t size = 0;
  index_t at = 0;
};

/// The stretches that `part` writes, counted from the beginning of part.counted.
template <storage_scalar T, memory_space Memory>
std::vector<collected_stretch> stretches_of(layout::parameter_map const& whole,
                                            unit_part<T, Memory> const& part) {
  std::vector<collected_stretch> found;
  if (part.map == nullptr) return found;
  layout::parameter const* last = nullptr;
  index_t number = 0;
  for (auto const& s : layout::segments_of(*part.map, part.counted)) {
    if (!layout::counts(*s.whole, part.tensor_rank)) continue;
    if (s.whole != last) {
      auto const same = [&](layout::parameter const& p) { return p.name == s.whole->name; };
      number = std::find_if(whole.begin(), whole.end(), same) - whole.begin();
      last = s.whole;
    }
    found.push_back({number, s.first_element, s.in_block.size(), s.in_block.begin - part.counted.begin});
  }
  return found;
}

/// Called by every rank of `comm`, in the same order.
template <comm::communicator Comm, exec::space Ex>
class collected_unit {
  using memory = typename Ex::memory;

public:
  collected_unit(Comm& comm, Ex& ex) : comm_(comm), ex_(ex) {}

  /// Learns which ranks hold what of a unit. Cost: two small messages.
  template <storage_scalar T>
  void select(layout::parameter_map const& whole, unit_part<T, memory> const& part) {
    whole_ = &whole;
    auto const mine = stretches_of(whole, part);
    constexpr auto words = static_cast<index_t>(sizeof(collected_stretch) / sizeof(index_t));
    index_t const sizes[] = {part.counted.size(), static_cast<index_t>(mine.size()) * words};
    std::vector<index_t> all(2 * static_cast<std::size_t>(comm_.size()));
    comm_.all_gather(std::span<index_t>(all), std::span<index_t const>(sizes));
    counts_.clear();
    std::vector<index_t> word_counts;
    index_t stretches = 0;
    for (std::size_t r = 0; r < all.size(); r += 2) {
      counts_.push_back(all[r]);
      word_counts.push_back(all[r + 1]);
      stretches += all[r + 1] / words;
    }
    stretches_.assign(is_root() ? static_cast<std::size_t>(stretches) : 0, {});
    comm_.gather_v(words_of(std::span(stretches_)), words_of(std::span(mine)), word_counts, 0);
    auto next = stretches_.begin();
    index_t before = 0;
    for (std::size_t r = 0; r < counts_.size() && is_root(); before += counts_[r], ++r)
      for (index_t n = 0; n < word_counts[r] / words; ++n) (next++)->at += before;
    std::sort(stretches_.begin(), stretches_.end(), [](auto const& a, auto const& b) {
      return a.parameter != b.parameter ? a.parameter < b.parameter : a.first < b.first;
    });
  }

  /// One array of the unit selected: every rank gives part.counted of it, rank 0 gets all. Cost: one message.
  template <storage_scalar S>
  std::vector<S> collect(memory_span<S const, memory> counted, site where) {
    index_t all = 0;
    for (auto count : counts_) all += is_root() ? count : 0;
    tensor<S, 1, memory> here({all}, {}, where);
    comm_.gather_v(here.span(), counted, counts_, 0, where);
    std::vector<S> values(static_cast<std::size_t>(all));
    copy(ex_, std::span(values), memory_span<S const, memory>(here.span()), where);
    return values;
  }

  /// Parameter `number` of the unit, out of what `collect` returned; on rank 0. Throws size_error
  /// (E-train-064) where some of it came from no rank, or from two.
  template <storage_scalar S>
  std::vector<S> whole(std::size_t number, std::vector<S> const& collected, site where) const {
    auto const& p = (*whole_)[number];
    std::vector<S> values(static_cast<std::size_t>(p.whole_size()));
    index_t end = 0;
    auto complete = true;
    for (auto const& s : stretches_) {
      if (s.parameter != static_cast<index_t>(number)) continue;
      complete = complete && s.first == end && s.size <= p.whole_size() - end;
      if (!complete) break;
      end += s.size;
      std::copy_n(collected.begin() + s.at, s.size, values.begin() + s.first);
    }
    if (!complete || end != p.whole_size())
      throw size_error("E-train-064", where, "of the ", p.whole_size(), " elements of ", p.name, ", element ",
                       end, " is written by no rank, or by two; every element must be counted once");
    return values;
  }

private:
  bool is_root() const { return comm_.rank() == 0; }

  template <class Stretch>
  static auto words_of(std::span<Stretch> list) {
    using word = std::conditional_t<std::is_const_v<Stretch>, index_t const, index_t>;
    constexpr auto words = sizeof(collected_stretch) / sizeof(index_t);
    return std::span<word>(reinterpret_cast<word*>(list.data()), list.size() * words);
  }

  Comm& comm_;
  Ex& ex_;
  layout::parameter_map const* whole_ = nullptr;
  std::vector<index_t> counts_; ///< Elements from each rank.
  std::vector<collected_stretch> stretches_;
};

} // namespace tessera::inline TESSERA_ABI::train::detail

#endif
