#include <tessera/core/memory.hpp>

#include <doctest/doctest.h>

#include "support/thrown.hpp"

using namespace tessera;

TEST_CASE("a buffer is zeroed, aligned, and counted under its kind until it goes") {
  memory_meter meter;
  {
    buffer<> const weights(1000, {&meter, memory_kind::parameters});
    buffer<> const state(24, {&meter, memory_kind::optimizer_state});
    CHECK(reinterpret_cast<std::uintptr_t>(weights.data()) % 64 == 0);
    for (int i = 0; i < 1000; ++i) CHECK_UNARY(static_cast<char const*>(weights.data())[i] == 0);
    CHECK(meter.current(memory_kind::parameters) == 1000);
    CHECK(meter.current(memory_kind::optimizer_state) == 24);
    CHECK(meter.current() == 1024);
    CHECK(meter.allocations() == 2);
  }
  CHECK(meter.current() == 0);
  CHECK(meter.current(memory_kind::parameters) == 0);
  CHECK(meter.peak() == 1024);
  CHECK(meter.peak(memory_kind::parameters) == 1000);
}

TEST_CASE("a large buffer begins on a huge page and is zeroed") {
  buffer<> const large(index_t{5} << 20);
  CHECK(reinterpret_cast<std::uintptr_t>(large.data()) % (2 << 20) == 0);
  CHECK(static_cast<char const*>(large.data())[(5 << 20) - 1] == 0);
}

TEST_CASE("peaks are of each kind and of the whole, not sums of peaks") {
  memory_meter meter;
  { buffer<> const first(100, {&meter, memory_kind::activations}); }
  { buffer<> const second(60, {&meter, memory_kind::communication}); }
  CHECK(meter.peak() == 100);
  CHECK(meter.peak(memory_kind::communication) == 60);
}

TEST_CASE("moving a buffer moves its memory and its account") {
  memory_meter meter;
  buffer<> a(64, {&meter, memory_kind::data});
  auto* const memory = a.data();
  buffer<> b(static_cast<buffer<>&&>(a));
  CHECK(b.data() == memory);
  CHECK(a.data() == nullptr); // NOLINT: looked at on purpose
  CHECK(a.bytes() == 0);
  CHECK(meter.current() == 64);
  b = buffer<>(32, {&meter, memory_kind::data});
  CHECK(meter.current() == 32);
  b = buffer<>();
  CHECK(meter.current() == 0);
  CHECK(b.data() == nullptr);
}

TEST_CASE("no bytes need no memory; negative and impossible amounts are errors that count nothing") {
  memory_meter meter;
  CHECK(buffer<>(0, {&meter, memory_kind::other}).data() == nullptr);
  CHECK(meter.allocations() == 0);
  CHECK(test::error_of<size_error>([&] { buffer<> b(-1, {&meter, memory_kind::other}); }).id == "E-core-008");
#if !defined(__SANITIZE_ADDRESS__) && !defined(__SANITIZE_THREAD__)
  auto const caught = test::error_of<out_of_memory>([&] {
    buffer<> b(INT64_MAX - 4096, {&meter, memory_kind::activations});
  });
  CHECK(caught.id == "E-core-009");
  CHECK(caught.says("activations"));
#endif
  CHECK(meter.current() == 0);
}

TEST_CASE("every kind has a name") {
  for (int k = 0; k < memory_kind_count; ++k) CHECK(std::string(name_of(static_cast<memory_kind>(k))) != "");
  CHECK(std::string(name_of(memory_kind::other)) == "other");
}
