#include <tessera/exec/host.hpp>

#include <atomic>
#include <numeric>
#include <stdexcept>

#include <doctest/doctest.h>

#include "support/reference.hpp"

using namespace tessera;

TEST_CASE("a parallel loop covers every index once, in disjoint ranges") {
  for (int threads : {1, 2, 5}) {
    exec::host ex({.threads = reference::threads(threads)});
    for (index_t count : {0, 1, 2, 7, 97, 1000})
      for (index_t grain : {0, 1, 10, 5000}) {
        std::vector<std::atomic<int>> seen(static_cast<std::size_t>(count));
        std::atomic<int> calls = 0;
        ex.parallel_for(count, grain, [&](index_t begin, index_t end) {
          ++calls;
          CHECK(begin < end);
          for (auto i = begin; i < end; ++i) ++seen[static_cast<std::size_t>(i)];
        });
        for (auto& times : seen) CHECK(times == 1);
        CHECK(calls <= threads);
        if (grain > 1 && count > 0) CHECK(calls <= std::max<index_t>(1, count / grain));
      }
  }
}

TEST_CASE("an exception of a loop's body reaches the caller") {
  exec::host ex({.threads = reference::threads(2)});
  CHECK_THROWS_AS(ex.parallel_for(100, 1, [](index_t, index_t) { throw std::out_of_range("any part"); }),
                  std::out_of_range);
  CHECK_NOTHROW(ex.parallel_for(100, 1, [](index_t, index_t) {})); // and the space still works
}

namespace {
struct counted {
  int value = 7;
  static inline int alive = 0;
  counted() { ++alive; }
  ~counted() { --alive; }
};
struct other_handle {
  int value = 1;
};
} // namespace

TEST_CASE("a handle is made once, kept, and destroyed with its space") {
  {
    exec::host ex({.threads = 1});
    ex.handle<counted>().value = 9;
    CHECK(ex.handle<other_handle>().value == 1);
    CHECK(ex.handle<counted>().value == 9);
    CHECK(counted::alive == 1);
    exec::host another({.threads = 1});
    CHECK(another.handle<counted>().value == 7);
    CHECK(counted::alive == 2);
  }
  CHECK(counted::alive == 0);
}

namespace {
struct holds_memory {
  explicit holds_memory(memory_account account) : memory(1000, account) {}
  buffer<> memory;
};
} // namespace

TEST_CASE("the space counts the memory of its handles") {
  exec::host ex({.threads = 1});
  CHECK(ex.scratch().current() == 0);
  ex.handle<holds_memory>();
  ex.handle<holds_memory>();
  CHECK(ex.scratch().current() == 1000);
}

TEST_CASE("a note is kept once") {
  exec::host ex({.threads = 1});
  ex.note("slower");
  ex.note("slower");
  ex.note("otherwise");
  CHECK(ex.notes() == std::vector<std::string>{"slower", "otherwise"});
}

TEST_CASE("thread counts: 0 takes what there is, less is refused") {
  CHECK(exec::host().threads() >= 1);
  CHECK(exec::host({.threads = reference::threads(3)}).threads() == reference::threads(3));
  CHECK(exec::host({.threads = 1}).description().starts_with("1 thread, "));
  try {
    exec::host ex({.threads = -1});
    FAIL("accepted");
  } catch (config_error const& failure) {
    CHECK(std::string(failure.id()) == "E-exec-002");
  }
}

TEST_CASE("host spaces are execution spaces, of different types by their product") {
  static_assert(exec::host_space<exec::host>);
  static_assert(exec::host_space<exec::basic_host<exec::portable_product>>);
  static_assert(!exec::space<int>);
  exec::host({.threads = 1}).synchronize();
}
