/// Blocks that units take in turn: gathered weights, and gradients on their way to their shards. Blocks of
/// one size serve all units of that size; each is made when it is first needed, and stays.
#ifndef TESSERA_PARALLEL_DETAIL_BLOCK_POOL_HPP
#define TESSERA_PARALLEL_DETAIL_BLOCK_POOL_HPP

#include <vector>

#include <tessera/core/tensor.hpp>

namespace tessera::inline TESSERA_ABI::parallel::detail {

/// At most so many blocks of one size.
struct shelf {
  index_t size = 0;
  std::size_t most = 0;
};

/// For blocks of the given sizes, of which at most `together` are in use at once.
inline std::vector<shelf> shelves_of(std::vector<index_t> const& sizes, std::size_t together) {
  std::vector<shelf> shelves;
  for (auto size : sizes) {
    auto known = shelves.begin();
    while (known != shelves.end() && known->size != size) ++known;
    if (known == shelves.end()) known = shelves.insert(known, {size, 0});
    if (known->most < together) ++known->most;
  }
  return shelves;
}

/// What a pool of them takes at most.
inline index_t elements_of(std::vector<shelf> const& shelves) {
  index_t sum = 0;
  for (auto const& s : shelves) sum += s.size * static_cast<index_t>(s.most);
  return sum;
}

template <class X, memory_space Memory>
class block_pool {
public:
  class block {
  public:
    memory_span<X, Memory> span() noexcept { return memory_.span(); }

  private:
    friend block_pool;
    tensor<X, 1, Memory> memory_;
    bool taken_ = false;
  };

  block_pool(std::vector<shelf> const& shelves, memory_account account) : account_(account) {
    shelves_.reserve(shelves.size());
    for (auto const& s : shelves) {
      shelves_.push_back({s, {}});
      shelves_.back().blocks.reserve(s.most); // their addresses stay
    }
  }

  /// A block of whatever content; null where all of that size are taken.
  block* take(index_t size, site where) {
    for (auto& shelf : shelves_) {
      if (shelf.is.size != size) continue;
      for (auto& one : shelf.blocks)
        if (!one.taken_) return mark(one);
      if (shelf.blocks.size() == shelf.is.most) return nullptr;
      auto& fresh = shelf.blocks.emplace_back();
      fresh.memory_ = tensor<X, 1, Memory>({size}, account_, where);
      return mark(fresh);
    }
    return nullptr;
  }
  void give_back(block& one) noexcept { one.taken_ = false; }

private:
  struct filled_shelf {
    shelf is;
    std::vector<block> blocks;
  };
  static block* mark(block& one) noexcept {
    one.taken_ = true;
    return &one;
  }

  std::vector<filled_shelf> shelves_;
  memory_account account_;
};

} // namespace tessera::inline TESSERA_ABI::parallel::detail

#endif
