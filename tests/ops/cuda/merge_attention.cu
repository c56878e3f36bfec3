#include <tessera/ops/cuda/merge_attention.cuh>

#include "ops/cuda/fixture.hpp"
#include "support/cuda.hpp"

using namespace cuda_fixture;

namespace {

/// Against the formula in float64 and the host, over rows of which some saw no key on one side or both.
template <class T>
void compare(exec::cuda& ex, extents<4> const& s, test::placement place) {
  exec::host host({.threads = 1});
  extents<3> const rows{s[0], s[2], s[1]};
  auto sums = reference::normal<float, 3>(rows, 3, 10.0f), more = reference::normal<float, 3>(rows, 4, 10.0f);
  auto on_host = reference::normal<float, 4>(s, 1), begin = reference::normal<float, 4>(s, 1);
  auto summand = reference::normal<T, 4>(s, 2);
  numbers exact_out, exact_sums;
  index_t row = 0;
  for (index_t b = 0; b < s[0]; ++b)
    for (index_t h = 0; h < s[2]; ++h)
      for (index_t t = 0; t < s[1]; ++t, ++row) {
        if (row % 5 == 3) {
          sums(b, h, t) = -INFINITY;
          for (index_t d = 0; d < s[3]; ++d) begin(b, t, h, d) = on_host(b, t, h, d) = NAN;
        }
        if (row % 7 == 2) {
          more(b, h, t) = -INFINITY;
          for (index_t d = 0; d < s[3]; ++d) summand(b, t, h, d) = T(NAN);
        }
        if (row % 5 == 3 && row % 7 == 2)
          for (index_t d = 0; d < s[3]; ++d) begin(b, t, h, d) = on_host(b, t, h, d) = 3; // stays
        auto const a = std::exp(static_cast<double>(sums(b, h, t)));
        auto const c = std::exp(static_cast<double>(more(b, h, t)));
        exact_sums.push_back(std::log(a + c));
      }
  for (index_t b = 0; b < s[0]; ++b)
    for (index_t t = 0; t < s[1]; ++t)
      for (index_t h = 0; h < s[2]; ++h) {
        auto const a = std::exp(static_cast<double>(sums(b, h, t)));
        auto const c = std::exp(static_cast<double>(more(b, h, t)));
        for (index_t d = 0; d < s[3]; ++d) {
          auto const x = a > 0 ? a * static_cast<double>(begin(b, t, h, d)) : 0;
          auto const y = c > 0 ? c * static_cast<double>(static_cast<float>(summand(b, t, h, d))) : 0;
          exact_out.push_back(a + c > 0 ? (x + y) / (a + c) : 3);
        }
      }

  test::on_device<float, 4> out(ex, begin, place);
  test::on_device<T, 4> in(ex, summand, place);
  test::on_device<float, 3> device_sums(ex, sums, place), device_more(ex, more, place);
  ops::merge_attention(ex, out.view(), device_sums.view(), in.view(), device_more.view());
  ops::merge_attention(host, on_host.view(), sums.view(), summand.view(), more.view());
  CHECK(reference::max_relative_error(out.read(ex), exact_out) < 1e-5);
  CHECK(reference::max_relative_error(on_host, exact_out) < 1e-5);
  auto const found = device_sums.read(ex);
  for (index_t i = 0; i < sums.size(); ++i) {
    auto const expected = exact_sums[static_cast<std::size_t>(i)];
    auto const same = expected == -INFINITY
                          ? found.data()[i] == -INFINITY && sums.data()[i] == -INFINITY
                          : std::fabs(static_cast<double>(found.data()[i]) - expected) < 1e-4;
    CHECK(same);
  }
}

} // namespace

TEST_CASE_TEMPLATE("merge_attention on CUDA is the formula, wherever rows lie", T, float, bf16, fp16) {
  exec::cuda ex;
  for (auto const& s : {extents<4>{1, 1, 1, 1}, extents<4>{2, 9, 3, 17}, extents<4>{1, 40, 2, 64},
                        extents<4>{1, 3, 2, 300}, extents<4>{2, 0, 2, 8}, extents<4>{1, 5, 2, 0}})
    for (auto place : {test::placement{0, 0}, test::placement{8, 8}, test::placement{1, 3}}) {
      CAPTURE(s[3]);
      CAPTURE(place.offset);
      compare<T>(ex, s, place);
    }
}
