#include <tessera/ops/attention.hpp>

#include <tessera/exec/host.hpp>

#include <doctest/doctest.h>

#include "ops/attention_reference.hpp"
#include "support/reference.hpp"

using namespace tessera;
using attention_reference::exact;
using attention_reference::sizes;
using reference::doubles;
using reference::max_relative_error;

namespace {

template <class T>
void compare(sizes s, ops::attention_options options, int threads) {
  CAPTURE(s.batch);
  CAPTURE(s.queries);
  CAPTURE(s.keys);
  CAPTURE(s.heads);
  CAPTURE(s.key_heads);
  CAPTURE(s.width);
  exec::host ex({.threads = reference::threads(threads)});
  extents<4> const query_sizes{s.batch, s.queries, s.heads, s.width};
  extents<4> const key_sizes{s.batch, s.keys, s.key_heads, s.width};
  auto q = reference::normal<T, 4>(query_sizes, 1), d_out = reference::normal<T, 4>(query_sizes, 2);
  auto k = reference::normal<T, 4>(key_sizes, 3), v = reference::normal<T, 4>(key_sizes, 4);
  tensor<T, 4> out(query_sizes), dq(query_sizes), dk(key_sizes), dv(key_sizes);
  reference::fill_normal(dq.span(), 5); // must be overwritten
  reference::fill_normal(dk.span(), 6);
  tensor<float, 3> log_sum_exp({s.batch, s.heads, s.queries});

  auto const scale = options.scale == 0 ? 1 / std::sqrt(static_cast<double>(s.width)) : options.scale;
  exact const expected(s, doubles(q.span()), doubles(k.span()), doubles(v.span()), doubles(d_out.span()),
                       scale, options.causal,
                       options.first_query < 0 ? s.keys - s.queries : options.first_query);
  ops::attention(ex, out.view(), log_sum_exp.view(), q, k, v, options);
  CHECK(max_relative_error(out, expected.out) < reference::tolerance<T>());
  CHECK(max_relative_error(log_sum_exp, expected.log_sum_exp) < 1e-5);
  ops::attention_backward(ex, dq.view(), dk.view(), dv.view(), d_out, q, k, v, out, log_sum_exp, options);
  CHECK(max_relative_error(dq, expected.dq) < reference::tolerance<T>());
  CHECK(max_relative_error(dk, expected.dk) < reference::tolerance<T>());
  CHECK(max_relative_error(dv, expected.dv) < reference::tolerance<T>());
}

} // namespace

TEST_CASE_TEMPLATE("attention and its gradients are those of the definition in float64", T, float, bf16,
                   fp16) {
  for (auto const& s : {sizes{1, 1, 1, 1, 1, 1}, sizes{2, 5, 5, 3, 3, 7}, sizes{1, 97, 97, 2, 1, 16},
                        sizes{2, 64, 64, 4, 2, 64}, sizes{1, 13, 211, 6, 2, 33}, sizes{3, 1, 50, 2, 2, 8}}) {
    compare<T>(s, {}, 2);
    compare<T>(s, {.scale = 0.3f, .causal = false}, 1);
  }
}

TEST_CASE("attention crosses many blocks of queries and keys") {
  compare<float>({1, 301, 301, 1, 1, 19}, {}, 1);
  compare<float>({1, 193, 290, 2, 1, 48}, {}, 2);
}

TEST_CASE("first_query places the queries among the keys") {
  compare<float>({1, 7, 40, 2, 1, 8}, {.first_query = 0}, 1);
  compare<float>({1, 7, 40, 2, 1, 8}, {.first_query = 20}, 1);
  compare<float>({1, 12, 7, 2, 1, 8}, {.first_query = 0}, 1); // later queries see all keys
}

TEST_CASE("nothing to attend to gives zeros, and nothing to compute is legal") {
  exec::host ex({.threads = 1});
  tensor<float, 4> q({1, 2, 1, 4}), out({1, 2, 1, 4}), dq({1, 2, 1, 4}), no_keys({1, 0, 1, 4});
  tensor<float, 3> sums({1, 1, 2});
  reference::fill_normal(out.span(), 1);
  reference::fill_normal(dq.span(), 1);
  ops::attention(ex, out.view(), sums.view(), q, no_keys, no_keys, {.causal = false});
  ops::attention_backward(ex, dq.view(), no_keys.view(), no_keys.view(), q, q, no_keys, no_keys, out, sums,
                          {.causal = false});
  for (auto value : out.span()) CHECK(value == 0);
  for (auto value : dq.span()) CHECK(value == 0);

  auto keys = reference::normal<float, 4>({1, 3, 1, 4}, 1);
  tensor<float, 4> no_queries({1, 0, 1, 4}), dk({1, 3, 1, 4});
  tensor<float, 3> no_sums({1, 1, 0});
  reference::fill_normal(dk.span(), 1);
  ops::attention(ex, no_queries.view(), no_sums.view(), no_queries, keys, keys);
  ops::attention_backward(ex, no_queries.view(), dk.view(), dk.view(), no_queries, no_queries, keys, keys,
                          no_queries, no_sums);
  for (auto value : dk.span()) CHECK(value == 0);
}

TEST_CASE("slices of one packed tensor give what separate tensors give") {
  exec::host ex({.threads = reference::threads(2)});
  index_t const b = 2, t = 70, h = 3, d = 24;
  auto packed = reference::normal<float, 3>({b, t, 3 * h * d}, 9);
  tensor<float, 3> d_packed({b, t, 3 * h * d});
  auto const part = [&](tensor<float, 3>& from, index_t which) {
    return view<float, 4>(from.data() + which * h * d, {b, t, h, d}, {t * 3 * h * d, 3 * h * d, d, 1});
  };
  tensor<float, 4> separate[3]{tensor<float, 4>({b, t, h, d}), tensor<float, 4>({b, t, h, d}),
                               tensor<float, 4>({b, t, h, d})};
  for (int i = 0; i < 3; ++i)
    for (index_t x = 0; x < b; ++x)
      for (index_t y = 0; y < t; ++y)
        for (index_t z = 0; z < h; ++z)
          for (index_t e = 0; e < d; ++e) separate[i](x, y, z, e) = part(packed, i)(x, y, z, e);

  auto d_out = reference::normal<float, 4>({b, t, h, d}, 10);
  tensor<float, 4> out({b, t, h, d}), expected({b, t, h, d}), dq({b, t, h, d}), dk({b, t, h, d}),
      dv({b, t, h, d});
  tensor<float, 3> sums({b, h, t});
  ops::attention(ex, expected.view(), sums.view(), separate[0], separate[1], separate[2]);
  ops::attention(ex, out.view(), sums.view(), part(packed, 0), part(packed, 1), part(packed, 2));
  CHECK(max_relative_error(out, doubles(expected.span())) == 0);
  ops::attention_backward(ex, dq.view(), dk.view(), dv.view(), d_out, separate[0], separate[1], separate[2],
                          out, sums);
  ops::attention_backward(ex, part(d_packed, 0), part(d_packed, 1), part(d_packed, 2), d_out, part(packed, 0),
                          part(packed, 1), part(packed, 2), out, sums);
  CHECK(d_packed(1, 5, 2 * d + 3) == dq(1, 5, 2, 3));
  CHECK(d_packed(1, 69, h * d + 7) == dk(1, 69, 0, 7));
  CHECK(d_packed(0, 0, 2 * h * d + d) == dv(0, 0, 1, 0));
}

TEST_CASE("gradients agree with finite differences") {
  exec::host ex({.threads = 1});
  extents<4> const sizes{1, 5, 2, 3}, key_sizes{1, 8, 1, 3};
  auto q = reference::normal<float, 4>(sizes, 1), weights = reference::normal<float, 4>(sizes, 2);
  auto k = reference::normal<float, 4>(key_sizes, 3), v = reference::normal<float, 4>(key_sizes, 4);
  tensor<float, 4> out(sizes), dq(sizes), dk(key_sizes), dv(key_sizes);
  tensor<float, 3> sums({1, 2, 5});
  auto const loss = [&] {
    ops::attention(ex, out.view(), sums.view(), q, k, v);
    double total = 0;
    for (std::size_t i = 0; i < out.span().size(); ++i)
      total += static_cast<double>(out.span()[i]) * static_cast<double>(weights.span()[i]);
    return total;
  };
  loss();
  ops::attention_backward(ex, dq.view(), dk.view(), dv.view(), weights, q, k, v, out, sums);
  auto const check = [&](tensor<float, 4>& at, tensor<float, 4> const& gradient) {
    for (std::size_t i = 0; i < at.span().size(); ++i)
      CHECK(std::fabs(reference::central_difference(at.span()[i], 1e-2f, loss) -
                      static_cast<double>(gradient.span()[i])) < 1e-3);
  };
  check(q, dq);
  check(k, dk);
  check(v, dv);
}

TEST_CASE("attention gives the same bits on any number of threads") {
  auto q = reference::normal<float, 4>({2, 100, 4, 16}, 1),
       k = reference::normal<float, 4>({2, 100, 2, 16}, 2);
  tensor<float, 4> out[2]{tensor<float, 4>(q.extents()), tensor<float, 4>(q.extents())};
  tensor<float, 4> dk[2]{tensor<float, 4>(k.extents()), tensor<float, 4>(k.extents())};
  for (int i = 0; i < 2; ++i) {
    exec::host ex({.threads = reference::threads(i + 1)});
    tensor<float, 3> sums({2, 4, 100});
    tensor<float, 4> dq(q.extents()), dv(k.extents());
    ops::attention(ex, out[i].view(), sums.view(), q, k, k);
    ops::attention_backward(ex, dq.view(), dk[i].view(), dv.view(), q, q, k, k, out[i], sums);
  }
  CHECK(max_relative_error(out[0], doubles(out[1].span())) == 0);
  CHECK(max_relative_error(dk[0], doubles(dk[1].span())) == 0);
}

TEST_CASE("large scores do not overflow") {
  exec::host ex({.threads = 1});
  auto q = reference::normal<float, 4>({1, 200, 1, 8}, 1, 100.0f),
       k = reference::normal<float, 4>({1, 200, 1, 8}, 2);
  tensor<float, 4> out(q.extents());
  tensor<float, 3> sums({1, 1, 200});
  ops::attention(ex, out.view(), sums.view(), q, k, k);
  for (auto value : out.span()) REQUIRE(std::isfinite(value));
}

TEST_CASE("attention refuses shapes that do not fit") {
  exec::host ex({.threads = 1});
  tensor<float, 4> q({1, 4, 3, 2}), k({1, 4, 2, 2}), wide({1, 4, 3, 3}), out({1, 4, 3, 2});
  tensor<float, 3> sums({1, 3, 4});
  auto const id_of = [&](auto&& call) {
    try {
      call();
    } catch (size_error const& failure) {
      return std::string(failure.id());
    }
    return std::string();
  };
  CHECK(id_of([&] { ops::attention(ex, out.view(), sums.view(), q, k, k); }) == "E-ops-103");
  CHECK(id_of([&] { ops::attention(ex, out.view(), sums.view(), q, wide, q); }) == "E-ops-001");
  tensor<float, 4> one_key({1, 1, 3, 2});
  CHECK(id_of([&] { ops::attention(ex, out.view(), sums.view(), q, one_key, one_key); }) == "E-ops-104");
  view<float, 4> scattered(out.data(), {1, 4, 3, 1}, {24, 6, 2, 2});
  tensor<float, 4> narrow({1, 4, 3, 1});
  CHECK_NOTHROW(
      ops::attention(ex, scattered, sums.view(), narrow, narrow, narrow)); // a stride of one element
  view<float, 4> backwards(out.data(), {1, 1, 3, 2}, {6, 6, 1, 3});
  tensor<float, 4> one({1, 1, 3, 2});
  tensor<float, 3> one_sum({1, 3, 1});
  CHECK(id_of([&] { ops::attention(ex, backwards, one_sum.view(), one, one, one); }) == "E-ops-002");
}
