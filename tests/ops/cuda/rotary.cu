#include <tessera/ops/cuda/rotary.cuh>

#include "ops/cuda/fixture.hpp"
#include "support/cuda.hpp"

using namespace cuda_fixture;
using test::on_device;

namespace {

/// The pairs as complex numbers, turned by the angle's exponential.
template <class T>
numbers exact_rotary(tensor<T, 4> const& x, double theta, index_t first, bool inverse) {
  auto out = reference::doubles(x.span());
  auto const heads = x.extent(2), width = x.extent(3), half = width / 2;
  for (index_t token = 0; token < x.extent(0) * x.extent(1); ++token)
    for (index_t h = 0; h < heads; ++h)
      for (index_t i = 0; i < half; ++i) {
        auto& re = out[static_cast<std::size_t>((token * heads + h) * width + i)];
        auto& im = out[static_cast<std::size_t>((token * heads + h) * width + i + half)];
        auto const angle = (inverse ? -1 : 1) * static_cast<double>(first + token % x.extent(1)) /
                           std::pow(theta, 2 * static_cast<double>(i) / static_cast<double>(width));
        auto const a = re, c = im;
        re = a * std::cos(angle) - c * std::sin(angle);
        im = a * std::sin(angle) + c * std::cos(angle);
      }
  return out;
}

} // namespace

TEST_CASE_TEMPLATE("rotary on CUDA turns each pair by its angle, wherever it stands", T, float, bf16, fp16) {
  exec::cuda ex;
  exec::host host({.threads = 1});
  for (auto const& sizes :
       {extents<4>{0, 3, 2, 4}, {2, 0, 1, 8}, {1, 1, 1, 2}, {2, 7, 3, 6}, {2, 9, 3, 16}, {1, 3, 2, 64}})
    for (test::placement where : {test::placement{}, {.offset = 1}, {.gap = 8}, {.offset = 2, .gap = 3}})
      for (auto inverse : {false, true}) {
        ops::rotary_options const options{.positions = {.first = inverse ? 5 : 0}, .inverse = inverse};
        auto x = reference::normal<T, 4>(sizes, 1);
        on_device<T, 4> on(ex, x, where);
        auto const expected = exact_rotary(x, 10000, options.positions.first, inverse);
        ops::rotary(ex, on.view(), options);
        ops::rotary(host, x.view(), options);
        auto const got = on.read(ex);
        CHECK(reference::max_relative_error(got, expected) < reference::tolerance<T>());
        CHECK(reference::max_relative_error(got, reference::doubles(x.span())) < reference::tolerance<T>());
      }
}

TEST_CASE("rotary on CUDA leaves alone what a slice leaves out") {
  exec::cuda ex;
  // Rows of 3 query heads, 1 key head and 1 value head.
  auto const before = reference::normal<bf16, 4>({2, 5, 5, 16}, 1);
  auto const expected = exact_rotary(before, 10000, 0, false);
  on_device<bf16, 4> packed(ex, before);
  ops::rotary(ex, packed.view().slice(2, 0, 4));
  auto const after = packed.read(ex);
  for (index_t token = 0; token < 10; ++token)
    for (index_t i = 0; i < 80; ++i) {
      auto const at = token * 80 + i;
      auto const value = static_cast<double>(static_cast<float>(after.data()[at]));
      if (i < 64)
        CHECK(std::fabs(value - expected[static_cast<std::size_t>(at)]) < 2e-2);
      else
        CHECK(after.data()[at].bits == before.data()[at].bits);
    }
}

TEST_CASE_TEMPLATE("two stretches of a sequence turn on CUDA as on the host", T, float, bf16) {
  exec::cuda ex;
  exec::host host({.threads = 1});
  for (auto const& positions : {ops::token_positions{.first = 1, .split = 2, .second = 70},
                                {.first = 8, .split = 3, .second = 0},
                                {.first = 0, .split = 0, .second = 5}}) {
    auto x = reference::normal<T, 4>({2, 5, 3, 16}, 1);
    on_device<T, 4> on(ex, x);
    ops::rotary(ex, on.view(), {.positions = positions});
    ops::rotary(host, x.view(), {.positions = positions});
    CHECK(reference::max_relative_error(on.read(ex), reference::doubles(x.span())) <
          reference::tolerance<T>());
  }
}

TEST_CASE("positions beyond the table make a larger one, and known ones take no memory") {
  exec::cuda ex;
  auto const x = reference::normal<float, 4>({1, 4, 1, 8}, 1);
  for (index_t first : {0, 100, 3}) {
    on_device<float, 4> on(ex, x);
    ops::rotary(ex, on.view(), {.theta = 500000, .positions = {.first = first}});
    CHECK(reference::max_relative_error(on.read(ex), exact_rotary(x, 500000, first, false)) < 1e-5);
  }
  auto const allocations = ex.scratch().allocations();
  on_device<float, 4> on(ex, x);
  ops::rotary(ex, on.view(), {.theta = 500000, .positions = {.first = 50}});
  ex.synchronize();
  CHECK(ex.scratch().allocations() == allocations);
}
