#include <tessera/ops/add.hpp>

#include "fixture.hpp"

using namespace fixture;

TEST_CASE_TEMPLATE("add rounds the exact sum once, and may write over an input", T, float, bf16, fp16) {
  exec::host ex({.threads = 2});
  for (auto n : counts) {
    auto const a = reference::normal<T, 1>({n}, 1), b = reference::normal<T, 1>({n}, 2);
    tensor<T, 1> out({n}), expected({n});
    ops::add(ex, out.view(), a, b);
    for (index_t i = 0; i < n; ++i) expected(i) = T(static_cast<float>(a(i)) + static_cast<float>(b(i)));
    CHECK(bits(out) == bits(expected));
    auto in_place = reference::normal<T, 1>({n}, 1);
    ops::add(ex, in_place.view(), in_place, b);
    CHECK(bits(in_place) == bits(expected));
  }
}

TEST_CASE("add gives the same bits for any number of threads") {
  same_bits_for_any_thread_count([](exec::host& ex) {
    auto a = reference::normal<bf16, 1>({100003}, 1);
    ops::add(ex, a.view(), a, a);
    return bits(a);
  });
}

TEST_CASE("add refuses inputs of another size") {
  exec::host ex({.threads = 1});
  tensor<float, 1> three({3}), four({4});
  auto const caught = test::error_of<size_error>([&] { ops::add(ex, four.view(), four, three); });
  CHECK(caught.id == "E-ops-001");
  CHECK(caught.says("add: b has extents [3], expected [4]"));
}
