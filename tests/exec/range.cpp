#include <tessera/exec/range.hpp>

#include <string>
#include <vector>

#include <doctest/doctest.h>

#include <tessera/exec/host.hpp>

using namespace tessera;

namespace {
/// A space that writes down what a profiler would be told.
struct told {
  using memory = host_memory;
  using backend = exec::host_backend;
  void synchronize() {}
  void enter_range(char const* name) noexcept { calls.push_back(name); }
  void leave_range() noexcept { calls.push_back("."); }
  std::vector<std::string> calls;
};
} // namespace

TEST_CASE("a range begins and ends with its scope, however that is left") {
  told ex;
  {
    exec::range const outer(ex, "step");
    try {
      exec::range const inner(ex, "forward");
      throw 1;
    } catch (int) {
    }
  }
  CHECK(ex.calls == std::vector<std::string>{"step", "forward", ".", "."});
}

TEST_CASE("a space without a profiler has nothing to do") {
  exec::host ex({.threads = 1});
  static_assert(!exec::ranged_space<exec::host> && exec::ranged_space<told>);
  exec::range const here(ex, "forward");
}
