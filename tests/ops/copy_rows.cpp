#include <tessera/ops/copy_rows.hpp>

#include "fixture.hpp"

using namespace fixture;

namespace {

inline constexpr extents<4> sizes[] = {{1, 1, 1, 1}, {2, 3, 4, 5},   {3, 7, 1, 129},
                                       {2, 0, 3, 4}, {1, 17, 5, 16}, {2, 3, 4, 0}};

/// A view of extents `s` among the tokens, heads and rows of a larger tensor.
template <class T>
view<T, 4> among(tensor<T, 4>& memory, extents<4> const& s) {
  return memory.view().slice(1, 1, 1 + s[1]).slice(2, 2, 2 + s[2]).slice(3, 0, s[3]);
}
extents<4> larger(extents<4> const& s) {
  return {s[0], s[1] + 2, s[2] + 3, s[3] + 1};
}

template <class To, class From>
void check(extents<4> const& s, bool adds) {
  exec::host ex({.threads = 2});
  auto from = reference::normal<From, 4>(larger(s), 1);
  auto to = reference::normal<To, 4>(larger(s), 2), expected = reference::normal<To, 4>(larger(s), 2);
  auto const x = among(from, s);
  auto const y = among(expected, s);
  for (index_t b = 0; b < s[0]; ++b)
    for (index_t t = 0; t < s[1]; ++t)
      for (index_t h = 0; h < s[2]; ++h)
        for (index_t d = 0; d < s[3]; ++d) {
          auto const before = adds ? static_cast<float>(y(b, t, h, d)) : 0.0f;
          y(b, t, h, d) = To(before + static_cast<float>(x(b, t, h, d)));
        }
  if constexpr (std::same_as<To, float>) {
    if (adds) ops::add_rows(ex, among(to, s), x);
  }
  if (!adds) ops::copy_rows(ex, among(to, s), x);
  CHECK(bits(to) == bits(expected)); // nothing beside the rows was touched
}

} // namespace

TEST_CASE_TEMPLATE("copy_rows moves rows that lie anywhere, and rounds once", From, float, bf16, fp16) {
  for (auto const& s : sizes) {
    check<float, From>(s, false);
    check<bf16, From>(s, false);
    check<fp16, From>(s, false);
  }
}

TEST_CASE_TEMPLATE("add_rows adds in fp32", From, float, bf16, fp16) {
  for (auto const& s : sizes) check<float, From>(s, true);
}

TEST_CASE("heads whose rows are adjacent move as one") {
  exec::host ex({.threads = 1});
  auto const from = reference::normal<float, 4>({2, 3, 4, 5}, 1);
  tensor<float, 4> to(from.extents());
  ops::copy_rows(ex, to.view(), from.view());
  CHECK(bits(to) == bits(from));
}

TEST_CASE("copy_rows gives the same bits for any number of threads") {
  same_bits_for_any_thread_count([](exec::host& ex) {
    auto x = reference::normal<float, 4>({2, 301, 3, 37}, 1);
    auto const y = reference::normal<bf16, 4>(x.extents(), 2);
    ops::add_rows(ex, x.view(), y.view());
    return bits(x);
  });
}

TEST_CASE("copy_rows refuses other extents, and elements that are not adjacent") {
  exec::host ex({.threads = 1});
  tensor<float, 4> a({1, 2, 3, 4}), b({1, 2, 3, 5});
  auto const caught = test::error_of<size_error>([&] { ops::copy_rows(ex, a.view(), b.view()); });
  CHECK(caught.id == "E-ops-001");
  CHECK(caught.says("copy_rows: in has extents [1, 2, 3, 5], expected [1, 2, 3, 4]"));
  CHECK(test::error_of<size_error>([&] { ops::add_rows(ex, b.view(), a.view()); }).id == "E-ops-001");
  view<float, 4> const transposed(a.data(), {1, 2, 3, 4}, {24, 12, 1, 3});
  CHECK(test::error_of<size_error>([&] { ops::copy_rows(ex, transposed, a.view()); }).id == "E-ops-002");
  CHECK(test::error_of<size_error>([&] { ops::copy_rows(ex, a.view(), transposed); }).id == "E-ops-002");
}
