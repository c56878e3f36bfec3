/// A stack of memory for activations: forward takes pieces in order, backward gives them back in reverse, and
/// nothing is allocated in the steady state of a training step. Sized once, from the plan.
///
///     arena<> memory(bytes, {&meter, memory_kind::activations});
///     auto mark = memory.mark();
///     auto hidden = memory.take<bf16, 2>({tokens, width});
///     memory.release(mark);                 // hidden and everything after it
#ifndef TESSERA_CORE_ARENA_HPP
#define TESSERA_CORE_ARENA_HPP

#include <tessera/core/memory.hpp>

namespace tessera::inline TESSERA_ABI {

template <memory_space Memory = host_memory>
class arena {
public:
  /// Every piece begins at a boundary of this many bytes.
  static constexpr index_t alignment = 64;

  arena() = default;
  explicit arena(index_t capacity, memory_account account = {}, site where = site::here())
      : memory_(capacity, account, where) {}
  /// Pieces that its own `capacity` has no room for stand in `more`, which it borrows: for scratch that
  /// several arenas share, one at a time.
  arena(index_t capacity, buffer<Memory> const& more, memory_account account = {}, site where = site::here())
      : memory_(capacity, account, where), more_(more.data()), more_bytes_(more.bytes()) {}

  /// A position to release to.
  struct position {
    index_t used = 0;
  };
  position mark() const noexcept { return {used_}; }

  /// Gives back everything taken since `to`. Throws size_error if `to` lies ahead of what is taken.
  void release(position to, site where = site::here()) {
    if (to.used < 0 || to.used > used_)
      throw size_error("E-core-010", where, "arena released to ", to.used, " bytes, only ", used_,
                       " are taken");
    used_ = to.used;
  }

  /// A contiguous, uninitialised piece. Throws out_of_memory when the planned capacity is exceeded.
  template <class T, int Rank>
    requires std::is_trivially_copyable_v<T> view<T, Rank, Memory> take(extents<Rank> const& sizes,
                                                                        site where = site::here()) {
      auto const count = element_count(sizes, where);
      auto start = used_;
      if (start < own_bytes() && !fits<T>(count, own_bytes() - start)) start = own_bytes();
      if (!fits<T>(count, capacity() - start))
        throw out_of_memory("E-core-011", where, "the activation arena of ", capacity(), " bytes has ",
                            capacity() - used_, " left and ", count, " elements of ", sizeof(T),
                            " bytes were asked for: its plan and the forward pass disagree");
      auto* piece = start < own_bytes() || more_ == nullptr
                        ? static_cast<char*>(memory_.data()) + start
                        : static_cast<char*>(more_) + (start - own_bytes());
      used_ = start + bytes_for<T>(count);
      if (used_ > peak_) peak_ = used_;
      return {static_cast<T*>(static_cast<void*>(piece)), sizes};
    }

  /// Bytes that `take` uses up for a piece of `count` elements of T: what a plan adds up.
  template <class T>
  static constexpr index_t bytes_for(index_t count) noexcept {
    return (count * static_cast<index_t>(sizeof(T)) + alignment - 1) / alignment * alignment;
  }

  index_t used() const noexcept { return used_; }
  index_t peak() const noexcept { return peak_; }
  /// With what it borrows; own_bytes() without.
  index_t capacity() const noexcept { return memory_.bytes() + more_bytes_; }
  index_t own_bytes() const noexcept { return memory_.bytes(); }

private:
  /// Compared before it is multiplied: a count may be anything up to 2^63 - 1.
  template <class T>
  static constexpr bool fits(index_t count, index_t room) noexcept {
    return count <= room / static_cast<index_t>(sizeof(T)) && bytes_for<T>(count) <= room;
  }

  buffer<Memory> memory_;
  void* more_ = nullptr;
  index_t more_bytes_ = 0;
  index_t used_ = 0;
  index_t peak_ = 0;
};

/// Releases an arena to where it stood, at the end of a scope.
template <memory_space Memory>
class arena_scope {
public:
  explicit arena_scope(arena<Memory>& memory) noexcept : memory_(memory), start_(memory.mark()) {}
  ~arena_scope() {
    if (start_.used <= memory_.used()) memory_.release(start_);
  }
  arena_scope(arena_scope const&) = delete;
  arena_scope& operator=(arena_scope const&) = delete;

private:
  arena<Memory>& memory_;
  typename arena<Memory>::position start_;
};

} // namespace tessera::inline TESSERA_ABI

#endif
