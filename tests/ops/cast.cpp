#include <tessera/ops/cast.hpp>

#include "fixture.hpp"

using namespace fixture;

namespace {

template <class To, class From>
void casts_like_the_scalar_type(exec::host& ex) {
  for (auto n : counts) {
    auto const in = reference::normal<From, 1>({n}, 3, 100.0f);
    tensor<To, 1> out({n}), expected({n});
    ops::cast(ex, out.view(), in.view());
    for (index_t i = 0; i < n; ++i)
      if constexpr (std::same_as<To, From>)
        expected(i) = in(i);
      else
        expected(i) = To(static_cast<float>(in(i)));
    CHECK(bits(out) == bits(expected));
  }
}

} // namespace

TEST_CASE_TEMPLATE("cast converts each element as its type does", T, float, bf16, fp16) {
  exec::host ex({.threads = 2});
  casts_like_the_scalar_type<float, T>(ex);
  casts_like_the_scalar_type<bf16, T>(ex);
  casts_like_the_scalar_type<fp16, T>(ex);
}

TEST_CASE("cast keeps NaN and infinities and rounds large numbers to infinity") {
  exec::host ex({.threads = 1});
  tensor<float, 1> in({20}), back({20});
  for (index_t i = 0; i < 20; ++i)
    in(i) = i % 4 == 0 ? NAN : i % 4 == 1 ? INFINITY : i % 4 == 2 ? 1e6f : -1e6f;
  tensor<fp16, 1> half({20});
  ops::cast(ex, half.view(), in.view());
  ops::cast(ex, back.view(), half.view());
  for (index_t i = 0; i < 20; ++i)
    CHECK((i % 4 == 0 ? std::isnan(back(i)) : back(i) == (i % 4 == 3 ? -INFINITY : INFINITY)));
}

TEST_CASE("cast refuses another size") {
  exec::host ex({.threads = 1});
  tensor<float, 1> three({3});
  tensor<bf16, 1> four({4});
  CHECK(test::error_of<size_error>([&] { ops::cast(ex, four.view(), three.view()); }).id == "E-ops-001");
}
