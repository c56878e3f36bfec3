#include <tessera/core/tensor.hpp>

#include <doctest/doctest.h>

#include "support/thrown.hpp"

using namespace tessera;

TEST_CASE("a tensor is zero, contiguous, and seen through views and spans") {
  tensor<float, 3> x({2, 3, 5});
  CHECK(x.size() == 30);
  CHECK(x.extents() == extents<3>{2, 3, 5});
  CHECK(x.extent(2) == 5);
  for (auto v : x.span()) CHECK(v == 0);
  x(1, 2, 4) = 7;
  CHECK(x.span()[29] == 7);
  view<float const, 3> const seen = x;
  CHECK(seen(1, 2, 4) == 7);
  CHECK(seen.contiguous());
  auto const& constant = x;
  CHECK(constant.view()(1, 2, 4) == 7);
  static_assert(std::same_as<decltype(constant.view()), view<float const, 3>>);
  static_assert(!std::is_copy_constructible_v<tensor<float, 3>>);
}

TEST_CASE("a tensor of no elements keeps its extents and has no memory") {
  tensor<float, 2> const x({0, 9});
  CHECK(x.size() == 0);
  CHECK(x.extent(1) == 9);
  CHECK(x.data() == nullptr);
  CHECK(x.span().empty());
}

TEST_CASE("a tensor is counted in bytes of its type") {
  memory_meter meter;
  tensor<double, 1> const x({10}, {&meter, memory_kind::gradients});
  CHECK(meter.current(memory_kind::gradients) == 80);
}

TEST_CASE("impossible extents are refused before any memory is asked for") {
  CHECK(test::error_of<size_error>([] { tensor<float, 2> x({3, -1}); }).id == "E-core-001");
  CHECK(test::error_of<size_error>([] {
          tensor<float, 2> x({index_t{1} << 40, index_t{1} << 40});
        }).id == "E-core-002");
  auto const caught =
      test::error_of<size_error>([] { tensor<double, 1> x({INT64_MAX / 2}); }); // bytes overflow
  CHECK(caught.id == "E-core-002");
  CHECK(caught.says("bytes"));
}

TEST_CASE("moving a tensor moves its memory") {
  tensor<int, 1> a({3});
  a(1) = 5;
  auto* const memory = a.data();
  tensor<int, 1> const b(static_cast<tensor<int, 1>&&>(a));
  CHECK(b.data() == memory);
  CHECK(b(1) == 5);
}
