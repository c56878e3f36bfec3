#include <tessera/ops/linear_swiglu.hpp>

#include <array>

#include "ops/linear_swiglu_reference.hpp"

using namespace fixture;
using linear_swiglu_reference::exact;

namespace {

template <class T, class Ex>
void compare(Ex& ex, index_t m, index_t k, index_t f) {
  CAPTURE(m);
  CAPTURE(k);
  CAPTURE(f);
  auto const x = reference::normal<T, 2>({m, k}, 1), w = reference::normal<T, 2>({2 * f, k}, 2);
  exact const expected(m, k, f, reference::doubles(x.span()), reference::doubles(w.span()));
  tensor<T, 2> packed_out({m, f}), packed_gate_up({m, 2 * f});
  ops::linear_swiglu(ex, packed_out.view(), packed_gate_up, x, w);
  CHECK(reference::max_relative_error(packed_out, expected.out) < reference::tolerance<T>());
  CHECK(reference::max_relative_error(packed_gate_up, expected.gate_up) < reference::tolerance<T>());

  apart<T> in(x), weight(w), out(packed_out), gate_up(packed_gate_up);
  for (index_t i = 0; i < m; ++i) {
    for (index_t j = 0; j < f; ++j) out.rows(i, j) = T(NAN);
    for (index_t j = 0; j < 2 * f; ++j) gate_up.rows(i, j) = T(NAN);
  }
  ops::linear_swiglu(ex, out.rows, gate_up.rows, in.rows, weight.rows);
  CHECK(reference::max_relative_error(out.packed(), expected.out) < reference::tolerance<T>());
  CHECK(reference::max_relative_error(gate_up.packed(), expected.gate_up) < reference::tolerance<T>());
  CHECK(out.padding_is(77));
  CHECK(gate_up.padding_is(77));
}

} // namespace

TEST_CASE_TEMPLATE("linear_swiglu is that of float64, packed and with rows apart, by either policy", T, float,
                   bf16, fp16) {
  exec::host ex({.threads = reference::threads(2)});
  exec::basic_host<exec::portable_product> portable({.threads = reference::threads(2)});
  // The last has more rows than a block.
  for (auto const& [m, k, f] : {std::array<index_t, 3>{0, 3, 5},
                                {3, 0, 5},
                                {3, 5, 0},
                                {1, 1, 1},
                                {7, 13, 31},
                                {37, 41, 43},
                                {65, 17, 150},
                                {530, 3, 2050}}) {
    compare<T>(ex, m, k, f);
    compare<T>(portable, m, k, f);
  }
}

TEST_CASE_TEMPLATE("linear_swiglu rounds its output once: it is nearer than swiglu of the rounded product", T,
                   bf16, fp16) {
  exec::host ex({.threads = reference::threads(2)});
  index_t const m = 67, k = 129, f = 101;
  auto const in = reference::normal<T, 2>({m, k}, 1), weight = reference::normal<T, 2>({2 * f, k}, 2, 0.1f);
  exact const expected(m, k, f, reference::doubles(in.span()), reference::doubles(weight.span()));
  tensor<T, 2> out({m, f}), gate_up({m, 2 * f}), of_rounded({m, f});
  ops::linear_swiglu(ex, out.view(), gate_up, in, weight);
  ops::swiglu(ex, of_rounded.view(), gate_up);
  auto const mean_error = [&](tensor<T, 2> const& values) {
    auto const given = reference::doubles(values.span());
    double sum = 0;
    for (std::size_t i = 0; i < given.size(); ++i) sum += std::fabs(given[i] - expected.out[i]);
    return sum / static_cast<double>(given.size());
  };
  CHECK(mean_error(out) < 0.8 * mean_error(of_rounded));
}

TEST_CASE("linear_swiglu names the argument that does not fit") {
  exec::host ex({.threads = 1});
  tensor<float, 2> out({2, 3}), gate_up({2, 6}), in({2, 4}), weight({6, 4}), wrong({5, 4});
  CHECK(test::error_of<size_error>([&] {
          ops::linear_swiglu(ex, out.view(), gate_up, in, wrong);
        }).says("linear_swiglu: weight has extents [5, 4], expected [6, 4]"));
  CHECK(test::error_of<size_error>([&] {
          ops::linear_swiglu(ex, out.view(), out, in, weight);
        }).says("gate_up"));
  CHECK(test::error_of<size_error>([&] {
          ops::linear_swiglu(ex, out.view(), gate_up, wrong, weight);
        }).says("out"));
  auto const gaps = view<float, 2>(gate_up.data(), {2, 3}, {6, 2});
  CHECK(test::error_of<size_error>([&] { ops::linear_swiglu(ex, gaps, gate_up, in, weight); }).id ==
        "E-ops-002");
}
