#include <tessera/ops/merge_attention.hpp>

#include <tessera/ops/attention.hpp>
#include <tessera/ops/copy_rows.hpp>

#include "attention_reference.hpp"
#include "fixture.hpp"

using namespace fixture;
using reference::doubles;
using reference::max_relative_error;

namespace {

/// Attention over keys in pieces that end at `ends`, merged one after the other.
template <class T>
void compare(attention_reference::sizes s, std::vector<index_t> const& ends, float scale) {
  exec::host ex({.threads = 2});
  auto const q = reference::normal<T, 4>({s.batch, s.queries, s.heads, s.width}, 1);
  auto const k = reference::normal<T, 4>({s.batch, s.keys, s.key_heads, s.width}, 2);
  auto const v = reference::normal<T, 4>(k.extents(), 3);
  tensor<T, 4> part(q.extents());
  tensor<float, 4> out(q.extents());
  tensor<float, 3> sums({s.batch, s.heads, s.queries}), part_sums(sums.extents());
  for (auto& value : out.span()) value = NAN; // is not read
  for (auto& value : sums.span()) value = -INFINITY;
  index_t begin = 0;
  for (auto end : ends) {
    ops::attention(ex, part.view(), part_sums.view(), q, k.view().slice(1, begin, end),
                   v.view().slice(1, begin, end), {.scale = scale, .causal = false});
    if (begin == end)
      for (auto& value : part.span()) value = T(NAN); // is not read either
    ops::merge_attention(ex, out.view(), sums.view(), part.view(), part_sums);
    begin = end;
  }
  attention_reference::exact const expected(s, doubles(q.span()), doubles(k.span()), doubles(v.span()),
                                            doubles(q.span()), static_cast<double>(scale), false, 0);
  CHECK(max_relative_error(out, expected.out) < reference::tolerance<T>());
  CHECK(max_relative_error(sums, expected.log_sum_exp) < 1e-5);
}

} // namespace

TEST_CASE_TEMPLATE("attention over pieces of the keys, merged, is attention over all of them", T, float, bf16,
                   fp16) {
  compare<T>({2, 5, 23, 4, 2, 7}, {9, 10, 23}, 0.4f);
  compare<T>({1, 33, 64, 2, 2, 16}, {32, 64}, 0.25f);
  compare<T>({1, 3, 20, 1, 1, 65}, {0, 7, 7, 20, 20}, 0.1f); // pieces without a key
  compare<T>({1, 3, 4, 1, 1, 1}, {1, 2, 3, 4}, 3.0f);
}

TEST_CASE("large scores and scores that differ by much do not overflow") {
  exec::host ex({.threads = 1});
  for (auto [a, b] : {std::pair{3e38f, 1e38f}, {-3e38f, 3e38f}, {88.0f, -88.0f}, {1e4f, 1e4f}}) {
    tensor<float, 4> out({1, 1, 1, 3}), part({1, 1, 1, 3});
    tensor<float, 3> sums({1, 1, 1}), part_sums({1, 1, 1});
    for (index_t d = 0; d < 3; ++d) out(0, 0, 0, d) = 1, part(0, 0, 0, d) = 2;
    sums(0, 0, 0) = a;
    part_sums(0, 0, 0) = b;
    ops::merge_attention(ex, out.view(), sums.view(), part.view(), part_sums);
    CHECK(out(0, 0, 0, 2) == (a > b ? 1.0f : a < b ? 2.0f : 1.5f));
    CHECK(sums(0, 0, 0) == doctest::Approx(std::fmax(a, b) + (a == b ? std::log(2.0f) : 0)));
  }
}

TEST_CASE("a merge of nothing with nothing is nothing") {
  exec::host ex({.threads = 1});
  auto out = reference::normal<float, 4>({1, 2, 1, 3}, 1),
       part = reference::normal<float, 4>({1, 2, 1, 3}, 2);
  auto const before = bits(out);
  tensor<float, 3> sums({1, 1, 2}), part_sums({1, 1, 2});
  for (auto* s : {&sums, &part_sums})
    for (auto& value : s->span()) value = -INFINITY;
  ops::merge_attention(ex, out.view(), sums.view(), part.view(), part_sums);
  CHECK(bits(out) == before);
  CHECK(sums(0, 0, 1) == -INFINITY);
}

TEST_CASE("some of the queries may be merged, wherever their rows lie") {
  exec::host ex({.threads = 1});
  auto const start = reference::normal<float, 4>({2, 9, 3, 4}, 1),
             part = reference::normal<float, 4>({2, 4, 3, 4}, 2);
  auto const start_sums = reference::normal<float, 3>({2, 3, 9}, 3),
             part_sums = reference::normal<float, 3>({2, 3, 4}, 4);
  tensor<float, 4> out(start.extents());
  tensor<float, 3> sums(start_sums.extents());
  exec::host one({.threads = 1});
  ops::copy_rows(one, out.view(), start.view());
  for (index_t i = 0; i < sums.size(); ++i) sums.data()[i] = start_sums.data()[i];
  ops::merge_attention(ex, out.view().slice(1, 3, 7), sums.view().slice(2, 3, 7), part.view(), part_sums);
  for (index_t b = 0; b < 2; ++b)
    for (index_t t = 0; t < 9; ++t)
      for (index_t h = 0; h < 3; ++h) {
        auto const inside = t >= 3 && t < 7;
        auto const a = std::exp(static_cast<double>(start_sums(b, h, t)));
        auto const c = inside ? std::exp(static_cast<double>(part_sums(b, h, t - 3))) : 0;
        CHECK(sums(b, h, t) == doctest::Approx(std::log(a + c)).epsilon(1e-5));
        for (index_t d = 0; d < 4; ++d) {
          auto const more = inside ? static_cast<double>(part(b, t - 3, h, d)) : 0;
          CHECK(out(b, t, h, d) ==
                doctest::Approx((a * static_cast<double>(start(b, t, h, d)) + c * more) / (a + c))
                    .epsilon(1e-5));
        }
      }
}

TEST_CASE("merge_attention gives the same bits for any number of threads, and refuses what does not fit") {
  same_bits_for_any_thread_count([](exec::host& ex) {
    auto out = reference::normal<float, 4>({2, 100, 3, 37}, 1);
    auto sums = reference::normal<float, 3>({2, 3, 100}, 2);
    auto const part = reference::normal<bf16, 4>(out.extents(), 3);
    auto const part_sums = reference::normal<float, 3>(sums.extents(), 4);
    ops::merge_attention(ex, out.view(), sums.view(), part.view(), part_sums);
    return bits(out) + bits(sums);
  });
  exec::host ex({.threads = 1});
  tensor<float, 4> out({1, 2, 3, 4}), narrow({1, 2, 3, 3});
  tensor<float, 3> sums({1, 3, 2}), wrong({1, 2, 3});
  CHECK(test::error_of<size_error>([&] {
          ops::merge_attention(ex, out.view(), sums.view(), narrow.view(), sums);
        }).says("merge_attention: part has extents [1, 2, 3, 3], expected [1, 2, 3, 4]"));
  CHECK(test::error_of<size_error>([&] {
          ops::merge_attention(ex, out.view(), sums.view(), out.view(), wrong);
        }).id == "E-ops-001");
}
