#include <tessera/ops/swiglu.hpp>

#include "fixture.hpp"

using namespace fixture;

namespace {

numbers exact_swiglu(numbers const& row) {
  auto const f = row.size() / 2;
  numbers out(f);
  for (std::size_t i = 0; i < f; ++i) out[i] = row[i] / (1 + std::exp(-row[i])) * row[f + i];
  return out;
}

} // namespace

TEST_CASE_TEMPLATE("swiglu and its backward agree with double, packed, with rows apart and in place", T,
                   float, bf16, fp16) {
  exec::host ex({.threads = 2});
  for (auto const size : shapes) {
    auto const rows = size.rows, width = size.width;
    CAPTURE(rows);
    CAPTURE(width);
    auto const gate_up = reference::normal<T, 2>({rows, 2 * width}, 1, 2.0f),
               d_out = reference::normal<T, 2>({rows, width}, 2);
    auto const w = static_cast<std::size_t>(width);
    auto const x = reference::doubles(gate_up.span()), dy = reference::doubles(d_out.span());
    numbers expected;
    for (index_t r = 0; r < rows; ++r) {
      auto const begin = x.begin() + r * 2 * width;
      auto const row = exact_swiglu(numbers(begin, begin + 2 * width));
      expected.insert(expected.end(), row.begin(), row.end());
    }
    auto const slope = reference::gradient_by_rows(x, 2 * w, [&](numbers const& row, std::size_t r) {
      auto const begin = dy.begin() + static_cast<index_t>(r * w);
      return reference::dot(exact_swiglu(row), numbers(begin, begin + width));
    });

    apart<T> in(gate_up), dy_rows(d_out), out(d_out), d_in(gate_up);
    ops::swiglu(ex, out.rows, in.rows);
    ops::swiglu_backward(ex, d_in.rows, dy_rows.rows, in.rows);
    CHECK(reference::max_relative_error(out.packed(), expected) < reference::tolerance<T>());
    CHECK(reference::max_relative_error(d_in.packed(), slope) < reference::tolerance<T>());
    CHECK(out.padding_is(77));
    CHECK(d_in.padding_is(77));

    ops::swiglu_backward(ex, in.rows, dy_rows.rows, in.rows);
    CHECK(bits(in.packed()) == bits(d_in.packed()));
  }
}

TEST_CASE("swiglu's slope keeps its limits for large gates") {
  for (auto x : {200.0f, 3e38f}) {
    CHECK(ops::silu_with_slope(x).slope == 1);
    CHECK(ops::silu_with_slope(-x).slope == doctest::Approx(0));
    CHECK(ops::silu_with_slope(x).value == x);
    CHECK(ops::silu_with_slope(-x).value == doctest::Approx(0));
  }
}

TEST_CASE("swiglu gives the same bits for any number of threads") {
  same_bits_for_any_thread_count([](exec::host& ex) {
    auto const x = reference::normal<bf16, 2>({301, 514}, 1);
    tensor<bf16, 2> out({301, 257}), d({301, 514});
    ops::swiglu(ex, out.view(), x);
    ops::swiglu_backward(ex, d.view(), out, x);
    return bits(out) + bits(d);
  });
}

TEST_CASE("swiglu refuses a gate and up of another width") {
  exec::host ex({.threads = 1});
  tensor<float, 2> out({2, 3}), in({2, 7}), d({2, 6});
  CHECK(test::error_of<size_error>([&] { ops::swiglu(ex, out.view(), in); }).id == "E-ops-001");
  CHECK(test::error_of<size_error>([&] { ops::swiglu_backward(ex, in.view(), out, d); }).says("d_gate_up"));
  auto const gaps = view<float, 2>(in.data(), {2, 3}, {6, 2});
  CHECK(test::error_of<size_error>([&] { ops::swiglu(ex, gaps, d); }).id == "E-ops-002");
}
