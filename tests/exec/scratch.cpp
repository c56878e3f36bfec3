#include <tessera/exec/scratch.hpp>

#include <doctest/doctest.h>

#include <tessera/exec/host.hpp>

using namespace tessera;

namespace {
struct sums;
struct orders;
} // namespace

TEST_CASE("scratch memory grows, stays, and is counted") {
  exec::host ex({.threads = 1});
  auto take = [&](index_t count) { return ex.handle<exec::scratch<sums>>().take<double>(count); };
  auto* const first = take(100);
  first[99] = 1.0;
  CHECK(ex.scratch().current() == 800);
  CHECK(take(10) == first);
  CHECK(take(100) == first);
  auto const allocations = ex.scratch().allocations();
  CHECK(allocations == 1);
  take(101)[100] = 1.0;
  CHECK(ex.scratch().current() == 808);
  CHECK(ex.scratch().peak() == 808);
  take(101);
  CHECK(ex.scratch().allocations() == allocations + 1);
}

TEST_CASE("each tag has scratch memory of its own") {
  exec::host ex({.threads = 1});
  auto* const a = ex.handle<exec::scratch<sums>>().take<float>(8);
  auto* const b = ex.handle<exec::scratch<orders>>().take<float>(8);
  CHECK(a != b);
}

TEST_CASE("nothing is asked for and nothing is taken") {
  exec::host ex({.threads = 1});
  ex.handle<exec::scratch<sums>>().take<float>(0);
  CHECK(ex.scratch().current() == 0);
}
