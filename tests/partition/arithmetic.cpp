#include <tessera/partition/arithmetic.hpp>

#include <tessera/ops/gelu.hpp>
#include <tessera/partition/redistribute.hpp>

#include "partition/fixture.hpp"
#include "support/thrown.hpp"

using namespace tessera;
using namespace tessera::partition;
using test::on_mesh;

namespace {
template <class P, class T = float>
using over_tensor = partitioned_tensor<T, 2, host_memory, placed<axis::tensor, P>>;

template <class A, class B, class C>
concept can_add = requires(exec::host& ex, A& a, B& b, C& c) {
  add(ex, a, b, c);
};
template <class X>
concept can_add_constant = requires(exec::host& ex, X& x) {
  add_constant(ex, x, x, 1.0f);
};
template <class X>
concept can_scale = requires(exec::host& ex, X& x) {
  scale(ex, x, x, 2.0f);
};
template <class X>
concept can_multiply = requires(X& x) {
  pointwise([](auto, auto, auto) {}, x, x, x);
};

using sum = over_tensor<partial<>>;
using largest = over_tensor<partial<comm::reduction::max>>;
using value = over_tensor<replicate>;
using reduced = over_tensor<invariant>;
using rows = over_tensor<shard<0>>;

static_assert(can_add<sum, sum, sum> && can_add<rows, rows, rows> && can_add<value, value, value>);
static_assert(!can_add<value, value, sum> && !can_add<sum, value, sum> && !can_add<sum, sum, value>);
static_assert(!can_add<value, value, reduced> && !can_add<rows, rows, over_tensor<shard<1>>>);
static_assert(!can_add<rows, rows, over_tensor<shard<0>, bf16>> && !can_add<largest, largest, largest>);
static_assert(can_add_constant<value> && can_add_constant<rows> && can_add_constant<reduced>);
static_assert(!can_add_constant<sum> && !can_add_constant<largest>);
static_assert(can_scale<sum> && can_scale<rows> && !can_scale<largest>);
static_assert(can_multiply<rows> && can_multiply<value> && !can_multiply<sum>);
} // namespace

TEST_CASE("what is linear may be done before the sum is taken: the result is the same") {
  on_mesh({.tensor = 3}, [](comm::threads& world, mesh<comm::threads>& on, exec::host& ex) {
    sum a(on.place(), {5, 3}), b(on.place(), {5, 3});
    for (index_t i = 0; i < 15; ++i) {
      a.local().data()[i] = static_cast<float>(i + world.rank());
      b.local().data()[i] = static_cast<float>(2 * world.rank());
    }
    add(ex, a, a, b);
    scale(ex, a, a, 0.5f);
    auto const total = redistribute<invariant>(ex, on, a);
    for (index_t i = 0; i < 15; ++i) CHECK(total.local().data()[i] == 0.5f * static_cast<float>(3 * i + 9));
  });
}

TEST_CASE("parts of a value take constants, in place too, and any function of each element") {
  on_mesh({.tensor = 4}, [](comm::threads&, mesh<comm::threads>& on, exec::host& ex) {
    over_tensor<shard<1>, bf16> x(on.place(), {3, 5}), y(on.place(), {3, 5});
    for (index_t i = 0; i < x.local().size(); ++i) x.local().data()[i] = bf16(static_cast<float>(i));
    add_constant(ex, y, x, 1.0f);
    add_constant(ex, y, y, 1.0f);
    for (index_t i = 0; i < x.local().size(); ++i) CHECK(y.local().data()[i] == static_cast<float>(i + 2));
    pointwise([&](auto out, auto in) { ops::gelu(ex, out, in); }, y, x);
    for (index_t i = 0; i < x.local().size(); ++i)
      CHECK(y.local().data()[i] == doctest::Approx(i == 0   ? 0
                                                   : i == 1 ? 0.8412
                                                            : 1.9546)
                                       .epsilon(i < 3 ? 0.01 : 10));
  });
}

TEST_CASE("parts of different wholes are refused") {
  on_mesh({.tensor = 2}, [](comm::threads&, mesh<comm::threads>& on, exec::host& ex) {
    rows a(on.place(), {4, 3}), b(on.place(), {5, 3});
    auto const end = test::error_of<size_error>([&] { add(ex, a, a, b); });
    CHECK(end.id == "E-partition-007");
    CHECK(end.says("a part of [5, 3]"));
  });
}
