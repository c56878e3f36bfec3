#include <tessera/ops/cuda/copy_rows.cuh>

#include "ops/cuda/fixture.hpp"
#include "support/cuda.hpp"

using namespace cuda_fixture;

namespace {

inline constexpr extents<4> sizes[] = {{1, 1, 1, 1},    {2, 3, 4, 8}, {2, 5, 3, 17}, {1, 70, 2, 64},
                                       {1, 2, 1, 1040}, {2, 0, 3, 4}, {3, 2, 5, 0}};
/// Rows on boundaries of 16 bytes, next to each other or apart, and rows anywhere.
inline constexpr test::placement places[] = {{0, 0}, {8, 8}, {1, 0}, {0, 3}};

/// Some of the heads and tokens, as a rank's part of them.
template <class V>
V among(V whole, extents<4> const& s) {
  return s[1] > 2 ? whole.slice(1, 1, s[1]).slice(2, s[2] / 2, s[2]) : whole;
}

template <class To, class From>
void check(exec::cuda& ex, extents<4> const& s, test::placement place, bool adds) {
  exec::host host({.threads = 1});
  auto const x = reference::normal<From, 4>(s, 1);
  auto expected = reference::normal<To, 4>(s, 2);
  test::on_device<From, 4> in(ex, x, place);
  test::on_device<To, 4> out(ex, expected, place);
  if constexpr (std::same_as<To, float>) {
    if (adds) {
      ops::add_rows(ex, among(out.view(), s), among(in.view(), s));
      ops::add_rows(host, among(expected.view(), s), among(x.view(), s));
    }
  }
  if (!adds) {
    ops::copy_rows(ex, among(out.view(), s), among(in.view(), s));
    ops::copy_rows(host, among(expected.view(), s), among(x.view(), s));
  }
  CHECK(bits(out.read(ex)) == bits(expected));
}

} // namespace

TEST_CASE_TEMPLATE("copy_rows and add_rows on CUDA give the host's bits, wherever rows lie", From, float,
                   bf16, fp16) {
  exec::cuda ex;
  for (auto const& s : sizes)
    for (auto place : places) {
      CAPTURE(s[3]);
      CAPTURE(place.offset);
      CAPTURE(place.gap);
      check<float, From>(ex, s, place, false);
      check<bf16, From>(ex, s, place, false);
      check<fp16, From>(ex, s, place, false);
      check<float, From>(ex, s, place, true);
    }
}
