#include <tessera/ops/scale.hpp>

#include "fixture.hpp"

using namespace fixture;

TEST_CASE_TEMPLATE("scale multiplies in float and rounds once, fill writes one value", T, float, bf16, fp16) {
  exec::host ex({.threads = 2});
  for (auto n : counts) {
    auto x = reference::normal<T, 1>({n}, 1);
    tensor<T, 1> out({n}), expected({n}), sevens({n});
    for (index_t i = 0; i < n; ++i) expected(i) = T(0.3f * static_cast<float>(x(i)));
    for (index_t i = 0; i < n; ++i) sevens(i) = T(7.0f);
    ops::scale(ex, out.view(), x, 0.3f);
    ops::scale(ex, x.view(), x, 0.3f);
    CHECK(bits(out) == bits(expected));
    CHECK(bits(x) == bits(expected));
    ops::fill(ex, x.view(), 7.0f);
    CHECK(bits(x) == bits(sevens));
  }
}

TEST_CASE("scale and fill refuse views with gaps and other sizes") {
  exec::host ex({.threads = 1});
  tensor<float, 2> matrix({4, 2});
  tensor<float, 1> three({3}), four({4});
  auto const column = view<float, 1>(matrix.data(), {4}, {2});
  CHECK(test::error_of<size_error>([&] { ops::fill(ex, column, 1.0f); }).id == "E-ops-003");
  CHECK(test::error_of<size_error>([&] { ops::scale(ex, four.view(), column, 1.0f); }).id == "E-ops-003");
  CHECK(test::error_of<size_error>([&] { ops::scale(ex, four.view(), three, 1.0f); }).id == "E-ops-001");
}
