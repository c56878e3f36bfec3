/// A named stretch of a program, from here to the end of the scope. On CUDA it shows in the profiler's time
/// line (NVTX); on the host it is nothing.
///
///     exec::range const here(ex, "forward");
#ifndef TESSERA_EXEC_RANGE_HPP
#define TESSERA_EXEC_RANGE_HPP

#include <tessera/exec/space.hpp>

namespace tessera::inline TESSERA_ABI::exec {

/// A space that tells a profiler.
template <class Ex>
concept ranged_space = space<Ex> && requires(Ex& ex, char const* name) {
  ex.enter_range(name);
  ex.leave_range();
};

template <space Ex>
class range {
public:
  range(Ex& ex, [[maybe_unused]] char const* name) noexcept : ex_(ex) {
    if constexpr (ranged_space<Ex>) ex_.enter_range(name);
  }
  ~range() {
    if constexpr (ranged_space<Ex>) ex_.leave_range();
  }
  range(range const&) = delete;
  range& operator=(range const&) = delete;

private:
  Ex& ex_;
};

} // namespace tessera::inline TESSERA_ABI::exec

#endif
