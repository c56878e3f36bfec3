#include <tessera/core/arena.hpp>

#include <doctest/doctest.h>

#include "support/thrown.hpp"

using namespace tessera;

TEST_CASE("pieces are aligned, disjoint and in order; released memory is given out again") {
  arena<> memory(4096);
  auto const a = memory.take<char, 1>({1});
  auto const b = memory.take<float, 2>({3, 7});
  CHECK(reinterpret_cast<std::uintptr_t>(b.data()) % 64 == 0);
  CHECK(reinterpret_cast<char*>(b.data()) - a.data() == 64);
  CHECK(memory.used() == 64 + 128);
  auto const mark = memory.mark();
  auto const c = memory.take<float, 1>({16});
  memory.release(mark);
  auto const d = memory.take<double, 1>({8});
  CHECK(static_cast<void*>(c.data()) == static_cast<void*>(d.data()));
  CHECK(memory.peak() == memory.used());
  memory.release({});
  CHECK(memory.used() == 0);
  CHECK(memory.peak() == 64 + 128 + 64);
}

TEST_CASE("the plan's bytes_for is what take uses") {
  arena<> memory(index_t{1} << 20);
  for (index_t n : {0, 1, 15, 16, 17, 1021}) {
    auto const before = memory.used();
    memory.take<float, 1>({n});
    CHECK(memory.used() - before == arena<>::bytes_for<float>(n));
  }
}

TEST_CASE("an arena gives out exactly its capacity, then says what is missing") {
  arena<> memory(128);
  memory.take<char, 1>({64});
  memory.take<char, 1>({64});
  memory.take<char, 1>({0});
  auto const caught = test::error_of<out_of_memory>([&] { memory.take<char, 1>({1}); });
  CHECK(caught.id == "E-core-011");
  CHECK(caught.says("128 bytes has 0 left and 1 elements"));
  CHECK(memory.used() == 128); // and stays as it was
}

TEST_CASE("hostile sizes do not wrap round") {
  arena<> memory(1024);
  CHECK(test::error_of<size_error>([&] { memory.take<float, 1>({-1}); }).id == "E-core-001");
  CHECK(test::error_of<size_error>([&] { memory.take<float, 2>({INT64_MAX, 2}); }).id == "E-core-002");
  CHECK(test::error_of<out_of_memory>([&] { memory.take<float, 1>({INT64_MAX / 4}); }).id == "E-core-011");
  CHECK(test::error_of<out_of_memory>([&] { memory.take<double, 1>({INT64_MAX / 2}); }).id == "E-core-011");
  CHECK(test::error_of<out_of_memory>([&] { memory.take<char, 1>({INT64_MAX}); }).id == "E-core-011");
  CHECK(memory.used() == 0);
}

TEST_CASE("releasing forwards is refused") {
  arena<> memory(256);
  memory.take<char, 1>({200});
  auto const later = memory.mark();
  memory.release({});
  CHECK(test::error_of<size_error>([&] { memory.release(later); }).id == "E-core-010");
  CHECK(test::error_of<size_error>([&] { memory.release({-64}); }).id == "E-core-010");
}

TEST_CASE("a scope releases what was taken in it, and nothing else") {
  arena<> memory(1024);
  memory.take<char, 1>({1});
  {
    arena_scope const scope(memory);
    memory.take<char, 1>({500});
  }
  CHECK(memory.used() == 64);
  {
    arena_scope const scope(memory);
    memory.release({}); // somebody already released further
  }
  CHECK(memory.used() == 0);
}

TEST_CASE("an arena is one allocation of its kind") {
  memory_meter meter;
  arena<> memory(1000, {&meter, memory_kind::activations});
  memory.take<float, 1>({100});
  CHECK(meter.allocations() == 1);
  CHECK(meter.current(memory_kind::activations) == 1000);
  CHECK(arena<>().capacity() == 0);
}

TEST_CASE("arenas that share further memory use their own first, and the shared one for what has no room") {
  buffer<> const shared(256);
  auto const in_shared = [&](void const* piece) {
    auto const* begin = static_cast<char const*>(shared.data());
    return piece >= begin && piece < begin + shared.bytes();
  };
  arena<> a(128, shared), b(128, shared);
  CHECK(a.capacity() == 384);
  CHECK(a.own_bytes() == 128);
  CHECK(!in_shared(a.take<char, 1>({64}).data()));
  auto const kept = a.mark();
  auto const large = a.take<char, 1>({128}); // the 64 bytes that are left would not do
  CHECK(large.data() == shared.data());
  CHECK(a.used() == 256);
  CHECK(a.take<char, 1>({1}).data() == large.data() + 128); // a stack: not what was left over
  CHECK(test::error_of<out_of_memory>([&] { a.take<char, 1>({65}); }).id == "E-core-011");
  a.release(kept);
  CHECK(!in_shared(a.take<char, 1>({64}).data()));
  CHECK(a.used() == 128);
  CHECK(b.take<char, 1>({256}).data() == shared.data());
  CHECK(test::error_of<out_of_memory>([&] { b.take<char, 1>({1}); }).says("384 bytes has 0 left"));
  arena<> none_of_its_own(0, shared);
  CHECK(none_of_its_own.take<float, 1>({64}).data() == shared.data());
}
