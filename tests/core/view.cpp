#include <tessera/core/view.hpp>

#include <numeric>
#include <vector>

#include <doctest/doctest.h>

#include "support/thrown.hpp"

using namespace tessera;

namespace {

struct elsewhere {
  static constexpr bool host_accessible = false;
  static constexpr char const* name = "elsewhere";
};

std::vector<int> counted(std::size_t n) {
  std::vector<int> numbers(n);
  std::iota(numbers.begin(), numbers.end(), 0);
  return numbers;
}

} // namespace

TEST_CASE("a view is trivially copyable, and views of other memories do not mix") {
  static_assert(std::is_trivially_copyable_v<view<float, 3>>);
  static_assert(std::is_convertible_v<view<float, 2>, view<float const, 2>>);
  static_assert(!std::is_convertible_v<view<float const, 2>, view<float, 2>>);
  static_assert(!std::is_convertible_v<view<float, 2, elsewhere>, view<float, 2>>);
  static_assert(!std::is_convertible_v<view<float, 2>, view<float const, 3>>);
}

TEST_CASE("elements lie in row-major order, or where the strides say") {
  auto numbers = counted(24);
  view<int, 3> const x(numbers.data(), {2, 3, 4});
  CHECK(x(1, 2, 3) == 23);
  CHECK(x(0, 1, 0) == 4);
  CHECK(x.strides() == extents<3>{12, 4, 1});
  view<int, 2> const transposed(numbers.data(), {4, 6}, {1, 4});
  CHECK(transposed(3, 5) == 23);
  CHECK_FALSE(transposed.contiguous());
  x(1, 0, 0) = -1;
  CHECK(numbers[12] == -1);
}

TEST_CASE("an empty view has no elements and is contiguous; a default view is empty") {
  CHECK(view<float, 2>().empty());
  CHECK(view<float, 2>().data() == nullptr);
  CHECK(view<float, 2>(nullptr, {0, 5}).size() == 0);
  CHECK(view<float, 2>(nullptr, {0, 5}).contiguous());
  CHECK(view<float, 2>(nullptr, {5, 0}).span().empty());
  CHECK(view<float, 3>(nullptr, {5, 0, 2}).reshape<1>({0}).size() == 0);
}

TEST_CASE("slices are windows on the same memory") {
  auto numbers = counted(30);
  view<int, 2> const x(numbers.data(), {5, 6});
  auto const columns = x.slice(1, 2, 4);
  CHECK(columns.extents() == extents<2>{5, 2});
  CHECK(columns(4, 1) == 27);
  CHECK_FALSE(columns.contiguous());
  auto const rows = x.slice(0, 1, 3);
  CHECK(rows.contiguous());
  CHECK(rows(0, 0) == 6);
  CHECK(x.slice(0, 5, 5).empty());
  CHECK(columns.slice(0, 3, 4).contiguous()); // one row has no gaps
  CHECK(x[3](2) == 20);
  CHECK(x[4].extent(0) == 6);
}

TEST_CASE("a slice outside the view is refused") {
  auto numbers = counted(6);
  view<int, 2> const x(numbers.data(), {2, 3});
  auto const id_of = [&](int d, index_t begin, index_t end) {
    return test::error_of<size_error>([&] { x.slice(d, begin, end); }).id;
  };
  CHECK(id_of(1, 0, 4) == "E-core-004");
  CHECK(id_of(1, -1, 2) == "E-core-004");
  CHECK(id_of(0, 2, 1) == "E-core-004");
  CHECK(id_of(2, 0, 0) == "E-core-004");
  CHECK(id_of(-1, 0, 0) == "E-core-004");
  CHECK(id_of(0, 0, INT64_MAX) == "E-core-004");
  CHECK(test::error_of<size_error>([&] { x.slice(1, 1, 9); }).says("[1, 9) of dimension 1"));
}

TEST_CASE("reshape keeps the elements and refuses other counts, gaps and overflow") {
  auto numbers = counted(24);
  view<int, 2> const x(numbers.data(), {4, 6});
  auto const cube = x.reshape<3>({2, 3, 4});
  CHECK(cube(1, 2, 3) == 23);
  CHECK(cube.reshape<1>({24})(5) == 5);
  auto const id_of = [](auto f) { return test::error_of<size_error>(f).id; };
  CHECK(id_of([&] { x.reshape<1>({23}); }) == "E-core-005");
  CHECK(id_of([&] { x.slice(1, 0, 3).reshape<1>({12}); }) == "E-core-006");
  CHECK(id_of([&] { x.reshape<2>({-4, -6}); }) == "E-core-001");
  CHECK(id_of([&] { x.reshape<2>({INT64_MAX, 2}); }) == "E-core-002");
  CHECK(id_of([&] { (void)x.slice(1, 0, 3).span(); }) == "E-core-007");
  CHECK(x.slice(0, 1, 2).span().size() == 6);
}

TEST_CASE("strides of extents 0 and 1 do not make gaps; wrong ones elsewhere do") {
  int one = 1;
  CHECK(view<int, 2>(&one, {1, 1}, {77, 99}).contiguous());
  auto numbers = counted(8);
  CHECK(view<int, 3>(numbers.data(), {2, 1, 4}, {4, 1000, 1}).contiguous());
  CHECK_FALSE(view<int, 2>(numbers.data(), {2, 3}, {4, 1}).contiguous());
  CHECK_FALSE(view<int, 2>(numbers.data(), {2, 2}, {0, 1}).contiguous());
}

TEST_CASE("offsets beyond 2^31 are 64-bit") {
  auto* const base = reinterpret_cast<char*>(std::uintptr_t{1} << 20);
  view<char, 2> const x(base, {3, index_t{1} << 32});
  CHECK(&x(2, 5) - base == (index_t{2} << 32) + 5);
  CHECK(x.slice(0, 1, 2).data() - base == index_t{1} << 32);
  CHECK(x.size() == index_t{3} << 32);
}

TEST_CASE("input takes views of mutable and of constant elements without deduction") {
  auto numbers = counted(3);
  auto const sum = []<class T>(view<T, 1> out, input<T, 1> in) {
    for (index_t i = 0; i < out.extent(0); ++i) out(i) += in(i);
  };
  view<int, 1> const x(numbers.data(), {3});
  sum(x, x);
  sum(x, view<int const, 1>(x));
  CHECK(numbers[2] == 8);
}
