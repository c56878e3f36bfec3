/// Scratch memory of the operations named by `Tag`, kept in a handle of the space: it grows at first use,
/// then stays, so that nothing is allocated in the steady state.
///
///     auto& room = ex.template handle<exec::scratch<my_operation, memory>>();
///     double* sums = room.template take<double>(n, where);
#ifndef TESSERA_EXEC_SCRATCH_HPP
#define TESSERA_EXEC_SCRATCH_HPP

#include <tessera/core/memory.hpp>

namespace tessera::inline TESSERA_ABI::exec {

/// The next `take` of the same tag hands out the same memory again. On a device that is safe as long as both
/// uses are on the space's stream.
template <class Tag, memory_space Memory = host_memory>
class scratch {
public:
  explicit scratch(memory_account account) noexcept : account_(account) {}

  /// `count` elements of whatever content.
  template <class T>
  T* take(index_t count, site where = site::here()) {
    auto const bytes = count * static_cast<index_t>(sizeof(T));
    if (bytes > memory_.bytes()) {
      memory_ = {}; // given back before more is asked for
      memory_ = buffer<Memory>(bytes, account_, where);
    }
    return static_cast<T*>(memory_.data());
  }

private:
  memory_account account_;
  buffer<Memory> memory_;
};

} // namespace tessera::inline TESSERA_ABI::exec

#endif
