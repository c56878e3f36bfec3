#include <tessera/core/memory_span.hpp>

#include <tessera/core/tensor.hpp>

#include <doctest/doctest.h>

using namespace tessera;

namespace {
struct far_memory {
  static constexpr bool host_accessible = false;
  static constexpr char const* name = "far";
};
struct other_far_memory {
  static constexpr bool host_accessible = false;
  static constexpr char const* name = "other";
};
struct shared_memory {
  static constexpr bool host_accessible = true;
  static constexpr char const* name = "shared";
};
} // namespace

static_assert(memory_space<host_memory> && memory_space<far_memory> && !memory_space<int>);
static_assert(std::same_as<memory_span<float, host_memory>, std::span<float>>);
static_assert(std::same_as<memory_span<float, shared_memory>, std::span<float>>);
static_assert(std::same_as<memory_span<float, far_memory>, device_span<float, far_memory>>);

// Neither memory nor constness is lost by conversion, and elements cannot be reached.
using far_span = device_span<float, far_memory>;
static_assert(std::is_trivially_copyable_v<far_span>);
static_assert(std::convertible_to<far_span, device_span<float const, far_memory>>);
static_assert(!std::convertible_to<device_span<float const, far_memory>, far_span>);
static_assert(!std::convertible_to<far_span, device_span<float, other_far_memory>>);
static_assert(!std::convertible_to<far_span, std::span<float>>);
static_assert(!std::convertible_to<std::span<float>, far_span>);
template <class S>
concept indexable = requires(S s) {
  s[0];
};
static_assert(!indexable<far_span> && indexable<std::span<float>>);

// What templates deduce.
static_assert(span_in<std::span<float const>, host_memory> && span_in<far_span, far_memory>);
static_assert(!span_in<far_span, host_memory> && !span_in<std::span<float>, far_memory> &&
              !span_in<int, host_memory>);

// A view and a tensor give the span of their memory.
static_assert(std::same_as<decltype(view<float, 2, far_memory>{}.span()), far_span>);
static_assert(std::same_as<decltype(view<float, 2>{}.span()), std::span<float>>);

TEST_CASE("the parts of a device span are those of a std::span") {
  float values[10] = {};
  far_span const far(values, 10);
  std::span<float> const near(values);
  CHECK(far.size() == 10);
  CHECK(far.size_bytes() == 40);
  CHECK(!far.empty());
  CHECK(far_span{}.empty());
  CHECK(far_span{}.data() == nullptr);
  auto const same = [](far_span a, std::span<float> b) {
    return a.data() == b.data() && a.size() == b.size();
  };
  for (std::size_t n : {0u, 1u, 7u, 10u}) {
    CHECK(same(far.first(n), near.first(n)));
    CHECK(same(far.last(n), near.last(n)));
    CHECK(same(far.subspan(n), near.subspan(n)));
    CHECK(same(far.subspan(n, 10 - n), near.subspan(n, 10 - n)));
  }
}
