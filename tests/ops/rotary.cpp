#include <tessera/ops/rotary.hpp>

#include "fixture.hpp"

using namespace fixture;

namespace {

/// The pairs as complex numbers, turned by the angle's exponential.
template <class T>
numbers exact_rotary(tensor<T, 4> const& x, double theta, index_t first, bool inverse) {
  auto out = reference::doubles(x.span());
  auto const heads = x.extent(2), width = x.extent(3), half = width / 2;
  for (index_t b = 0; b < x.extent(0); ++b)
    for (index_t t = 0; t < x.extent(1); ++t)
      for (index_t h = 0; h < heads; ++h)
        for (index_t i = 0; i < half; ++i) {
          auto const at = static_cast<std::size_t>(((b * x.extent(1) + t) * heads + h) * width + i);
          auto& re = out[at];
          auto& im = out[at + static_cast<std::size_t>(half)];
          auto angle = static_cast<double>(first + t) /
                       std::pow(theta, 2 * static_cast<double>(i) / static_cast<double>(width));
          if (inverse) angle = -angle;
          auto const a = re, c = im;
          re = a * std::cos(angle) - c * std::sin(angle);
          im = a * std::sin(angle) + c * std::cos(angle);
        }
  return out;
}

} // namespace

TEST_CASE_TEMPLATE("rotary turns each pair by its angle, forwards and backwards", T, float, bf16, fp16) {
  exec::host ex({.threads = 2});
  for (auto const& sizes : {extents<4>{0, 3, 2, 4}, {2, 0, 1, 8}, {1, 1, 1, 2}, {2, 7, 3, 6}, {1, 5, 1, 64}})
    for (auto theta : {10000.0f, 500000.0f})
      for (index_t first : {0, 1000})
        for (auto inverse : {false, true}) {
          auto x = reference::normal<T, 4>(sizes, 1);
          auto const expected = exact_rotary(x, theta, first, inverse);
          ops::rotary(ex, x.view(), {.theta = theta, .positions = {.first = first}, .inverse = inverse});
          CHECK(reference::max_relative_error(x, expected) < reference::tolerance<T>());
        }
}

TEST_CASE("rotary turns queries and keys where they stand in a packed projection") {
  exec::host ex({.threads = 2});
  // Rows of 3 query heads, 1 key head and 1 value head, 8 elements each.
  auto const before = reference::normal<float, 4>({2, 5, 5, 8}, 1);
  auto packed = reference::normal<float, 4>({2, 5, 5, 8}, 1);
  auto const expected = exact_rotary(before, 10000, 0, false);
  ops::rotary(ex, packed.view().slice(2, 0, 4));
  for (index_t row = 0; row < 10; ++row)
    for (index_t i = 0; i < 40; ++i) {
      auto const at = row * 40 + i;
      CHECK(packed.data()[at] ==
            doctest::Approx(i < 32 ? expected[static_cast<std::size_t>(at)] : before.data()[at]));
    }
}

TEST_CASE("decoding token by token turns as the whole sequence does") {
  exec::host ex({.threads = 1});
  auto whole = reference::normal<float, 4>({1, 9, 2, 6}, 1),
       parts = reference::normal<float, 4>({1, 9, 2, 6}, 1);
  ops::rotary(ex, whole.view());
  for (index_t t = 0; t < 9; ++t)
    ops::rotary(ex, parts.view().slice(1, t, t + 1), {.positions = {.first = t}});
  CHECK(bits(parts) == bits(whole));
}

TEST_CASE_TEMPLATE("two stretches of a sequence turn as they do in the whole one", T, float, bf16) {
  exec::host ex({.threads = 2});
  auto const x = reference::normal<T, 4>({2, 11, 3, 6}, 1);
  auto whole = reference::normal<T, 4>({2, 11, 3, 6}, 1);
  ops::rotary(ex, whole.view());
  for (auto const& positions : {ops::token_positions{.first = 1, .split = 2, .second = 7},
                                {.first = 8, .split = 3, .second = 0},
                                {.first = 0, .split = 0, .second = 5},
                                {.first = 4, .split = 5, .second = 0}}) {
    tensor<T, 4> part({2, 5, 3, 6}), expected(part.extents());
    for (index_t b = 0; b < 2; ++b)
      for (index_t t = 0; t < 5; ++t)
        for (index_t i = 0; i < 18; ++i) {
          (&part(b, t, 0, 0))[i] = (&x(b, positions(t), 0, 0))[i];
          (&expected(b, t, 0, 0))[i] = (&whole(b, positions(t), 0, 0))[i];
        }
    ops::rotary(ex, part.view(), {.positions = positions});
    CHECK(bits(part) == bits(expected));
  }
}

TEST_CASE("rotary gives the same bits for any number of threads") {
  same_bits_for_any_thread_count([](exec::host& ex) {
    auto x = reference::normal<bf16, 4>({3, 101, 7, 34}, 1);
    ops::rotary(ex, x.view());
    return bits(x);
  });
}

TEST_CASE("rotary refuses odd heads, positions that cannot be and an impossible theta") {
  exec::host ex({.threads = 1});
  tensor<float, 4> odd({1, 2, 1, 3}), x({1, 2, 1, 4});
  CHECK(test::error_of<size_error>([&] { ops::rotary(ex, odd.view()); }).id == "E-ops-007");
  CHECK(test::error_of<size_error>([&] { ops::rotary(ex, x.view(), {.positions = {.first = -1}}); }).id ==
        "E-ops-008");
  CHECK(test::error_of<size_error>([&] {
          ops::rotary(ex, x.view(), {.positions = {.first = 3, .split = 1, .second = 3}});
        }).id == "E-ops-008");
  CHECK(test::error_of<size_error>([&] {
          ops::rotary(ex, x.view(), {.positions = {.first = INT64_MAX}});
        }).says("9223372036854775807 + 2"));
  CHECK(test::error_of<config_error>([&] { ops::rotary(ex, x.view(), {.theta = 0}); }).id == "E-ops-009");
  auto const gaps = view<float, 4>(x.data(), {1, 1, 1, 4}, {8, 8, 8, 2});
  CHECK(test::error_of<size_error>([&] { ops::rotary(ex, gaps); }).id == "E-ops-002");
}
