/// Memory for redistributions under way: a space keeps what they gave back, so that the steady state
/// allocates nothing.
#ifndef TESSERA_PARTITION_DETAIL_WORKSPACES_HPP
#define TESSERA_PARTITION_DETAIL_WORKSPACES_HPP

#include <vector>

#include <tessera/core/memory.hpp>

namespace tessera::inline TESSERA_ABI::partition::detail {

/// What one redistribution may need; each part grows at first use and stays.
template <memory_space Memory>
struct workspace {
  buffer<Memory> packed, arrived, between[2];
  std::vector<index_t> sent, received; ///< Counts, one a rank.
  workspace* next_free = nullptr;
};

/// A handle of the execution space: the workspaces that are not in use.
template <memory_space Memory>
class workspaces {
public:
  explicit workspaces(memory_account account) noexcept : account_(account) {}
  workspaces(workspaces const&) = delete;
  workspaces& operator=(workspaces const&) = delete;
  ~workspaces() {
    while (free_ != nullptr) delete take();
  }

  workspace<Memory>* take() {
    auto* const one = free_;
    if (one == nullptr) return new workspace<Memory>;
    free_ = one->next_free;
    return one;
  }
  void give_back(workspace<Memory>* one) noexcept {
    one->next_free = free_;
    free_ = one;
  }

  /// Room for `count` elements, of whatever content.
  template <class T>
  T* grow(buffer<Memory>& room, index_t count, site where) {
    auto const bytes = count * static_cast<index_t>(sizeof(T));
    if (bytes > room.bytes()) {
      room = {}; // given back before more is asked for
      room = buffer<Memory>(bytes, account_, where);
    }
    return static_cast<T*>(room.data());
  }

private:
  memory_account account_;
  workspace<Memory>* free_ = nullptr;
};

/// A workspace for as long as it is needed, taken when it is first asked for.
template <memory_space Memory>
class lease {
public:
  explicit lease(workspaces<Memory>& from) noexcept : from_(&from) {}
  lease(lease&& other) noexcept : from_(other.from_), one_(other.one_) { other.one_ = nullptr; }
  lease& operator=(lease&&) = delete;
  ~lease() { end(); }

  workspace<Memory>* operator->() {
    if (one_ == nullptr) one_ = from_->take();
    return one_;
  }
  template <class T>
  T* grow(buffer<Memory> workspace<Memory>::*which, index_t count, site where) {
    return from_->template grow<T>(operator->()->*which, count, where);
  }
  template <class T>
  T* grow_between(int i, index_t count, site where) {
    return from_->template grow<T>(operator->()->between[i], count, where);
  }
  void end() noexcept {
    if (one_ != nullptr) from_->give_back(one_);
    one_ = nullptr;
  }

private:
  workspaces<Memory>* from_;
  workspace<Memory>* one_ = nullptr;
};

} // namespace tessera::inline TESSERA_ABI::partition::detail

#endif
