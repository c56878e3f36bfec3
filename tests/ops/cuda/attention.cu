#include <tessera/ops/cuda/attention.cuh>

#include <tessera/exec/host.hpp>

#include <doctest/doctest.h>

#include "ops/attention_reference.hpp"
#include "support/cuda.hpp"
#include "support/reference.hpp"

using namespace tessera;
using attention_reference::exact;
using attention_reference::sizes;
using reference::doubles;
using reference::max_relative_error;

namespace {

using device = exec::cuda_memory;

template <class T>
struct inputs {
  tensor<T, 4> q, k, v, d_out;

  explicit inputs(sizes s)
      : q(reference::normal<T, 4>({s.batch, s.queries, s.heads, s.width}, 1)),
        k(reference::normal<T, 4>({s.batch, s.keys, s.key_heads, s.width}, 3)),
        v(reference::normal<T, 4>(k.extents(), 4)), d_out(reference::normal<T, 4>(q.extents(), 2)) {}
};

template <class T>
struct results {
  tensor<T, 4> out, dq, dk, dv;
  tensor<float, 3> log_sum_exp;
};

template <class T>
results<T> on_cuda(inputs<T> const& x, ops::attention_options options, test::placement place) {
  exec::cuda ex;
  auto const query_sizes = x.q.extents(), key_sizes = x.k.extents();
  auto const garbage = reference::normal<T, 4>(query_sizes, 5), more = reference::normal<T, 4>(key_sizes, 6);
  test::on_device<T, 4> q(ex, x.q, place), k(ex, x.k, place), v(ex, x.v, place), d_out(ex, x.d_out, place),
      out(ex, garbage, place), dq(ex, garbage, place), dk(ex, more, place), dv(ex, more, place);
  tensor<float, 3, device> sums({query_sizes[0], query_sizes[2], query_sizes[1]});
  tensor<float, 3> log_sum_exp(sums.extents());
  ops::attention(ex, out.view(), sums.view(), q.view(), k.view(), v.view(), options);
  ops::attention_backward(ex, dq.view(), dk.view(), dv.view(), d_out.view(), q.view(), k.view(), v.view(),
                          out.view(), sums.view(), options);
  exec::copy(ex, log_sum_exp.view(), sums.view());
  return {out.read(ex), dq.read(ex), dk.read(ex), dv.read(ex), std::move(log_sum_exp)};
}

template <class T>
results<T> on_host(inputs<T> const& x, ops::attention_options options) {
  exec::host ex({.threads = 1});
  results<T> r{tensor<T, 4>(x.q.extents()), tensor<T, 4>(x.q.extents()), tensor<T, 4>(x.k.extents()),
               tensor<T, 4>(x.k.extents()),
               tensor<float, 3>({x.q.extents()[0], x.q.extents()[2], x.q.extents()[1]})};
  ops::attention(ex, r.out.view(), r.log_sum_exp.view(), x.q.view(), x.k.view(), x.v.view(), options);
  ops::attention_backward(ex, r.dq.view(), r.dk.view(), r.dv.view(), x.d_out.view(), x.q.view(), x.k.view(),
                          x.v.view(), r.out.view(), r.log_sum_exp.view(), options);
  return r;
}

/// Relative to the largest value; absolute where all are zero, as the gradients of the only key's score are.
template <class T>
double error_of(tensor<T, 4> const& found, std::vector<double> const& expected) {
  auto largest = 1e-30; // as in max_relative_error
  for (auto value : expected) largest = std::fmax(largest, std::fabs(value));
  return max_relative_error(found, expected) * (largest < 1e-5 ? largest : 1.0);
}

/// On CUDA, against the definition in float64 and against the host's operation.
template <class T>
void compare(sizes s, inputs<T> const& x, ops::attention_options options, test::placement place = {}) {
  CAPTURE(scalar_name<T>());
  CAPTURE(s.batch);
  CAPTURE(s.queries);
  CAPTURE(s.keys);
  CAPTURE(s.heads);
  CAPTURE(s.key_heads);
  CAPTURE(s.width);
  CAPTURE(options.causal);
  CAPTURE(place.gap);
  auto const scale = options.scale == 0 ? 1 / std::sqrt(static_cast<double>(s.width)) : options.scale;
  exact const expected(s, doubles(x.q.span()), doubles(x.k.span()), doubles(x.v.span()),
                       doubles(x.d_out.span()), scale, options.causal,
                       options.first_query < 0 ? s.keys - s.queries : options.first_query);
  auto const found = on_cuda(x, options, place), host = on_host(x, options);
  auto const bound = reference::tolerance<T>();
  CHECK(error_of(found.out, expected.out) < bound);
  CHECK(max_relative_error(found.log_sum_exp, expected.log_sum_exp) < 1e-5);
  CHECK(error_of(found.dq, expected.dq) < bound);
  CHECK(error_of(found.dk, expected.dk) < bound);
  CHECK(error_of(found.dv, expected.dv) < bound);
  CHECK(error_of(found.out, doubles(host.out.span())) < bound);
  CHECK(error_of(found.dq, doubles(host.dq.span())) < bound);
  CHECK(error_of(found.dk, doubles(host.dk.span())) < bound);
  CHECK(error_of(found.dv, doubles(host.dv.span())) < bound);
}

template <class T>
void compare(sizes s, ops::attention_options options = {}, test::placement place = {}) {
  compare(s, inputs<T>(s), options, place);
}

} // namespace

TEST_CASE_TEMPLATE("attention on CUDA and its gradients are those of the definition and of the host", T,
                   float, bf16, fp16) {
  for (auto const& s : {sizes{1, 1, 1, 1, 1, 64}, sizes{2, 5, 5, 4, 2, 64}, sizes{1, 67, 67, 2, 1, 64}})
    for (auto causal : {true, false}) compare<T>(s, {.causal = causal});
  compare<T>({1, 13, 80, 4, 1, 40});
  compare<T>({1, 35, 35, 2, 2, 8}, {.scale = -0.7f});
}

TEST_CASE_TEMPLATE("every tile of attention crosses blocks of queries and keys", T, bf16, fp16) {
  compare<T>({1, 130, 130, 1, 1, 64});
  compare<T>({1, 130, 130, 1, 1, 96}, {.causal = false});
  compare<T>({1, 67, 131, 2, 1, 128});
}

TEST_CASE("long rows of keys and many blocks of queries") {
  compare<bf16>({1, 301, 301, 1, 1, 64});
  compare<bf16>({1, 5, 300, 2, 1, 128}, {.causal = false});
}

TEST_CASE_TEMPLATE("rows that begin anywhere, and odd widths", T, float, bf16) {
  compare<T>({2, 19, 19, 2, 1, 64}, {}, {.offset = 8, .gap = 64}); // still in accesses of 16 bytes
  compare<T>({2, 19, 19, 2, 1, 64}, {}, {.gap = 1});
  compare<T>({1, 19, 40, 2, 1, 72}, {}, {.offset = 1, .gap = 8});
  compare<T>({1, 19, 19, 2, 2, 7}, {}, {.offset = 5, .gap = 3});
}

TEST_CASE("heads wider than any tile take the plain kernels") {
  compare<bf16>({1, 9, 35, 2, 1, 136});
  compare<fp16>({1, 3, 3, 1, 1, 200}, {.causal = false});
}

TEST_CASE("first_query places the queries among the keys") {
  for (index_t first_query : {0, 20, 33}) {
    compare<float>({1, 7, 40, 2, 1, 8}, {.first_query = first_query});
    compare<bf16>({1, 7, 40, 2, 1, 64}, {.first_query = first_query});
  }
  compare<float>({1, 12, 7, 2, 1, 8}, {.first_query = 0}); // later queries see all keys
  compare<bf16>({1, 150, 70, 2, 1, 64}, {.first_query = 0});
}

TEST_CASE("scores that rise along the keys move the reference of the exponentials") {
  sizes const s{1, 20, 330, 1, 1, 64};
  for (auto rise : {0.02f, 0.1f, -0.1f}) {
    CAPTURE(rise);
    inputs<bf16> x(s);
    for (index_t t = 0; t < s.queries; ++t) x.q(0, t, 0, 0) = bf16(64.0f);
    for (index_t j = 0; j < s.keys; ++j) x.k(0, j, 0, 0) = bf16(rise / 8 * static_cast<float>(j));
    compare(s, x, {});
  }
}

TEST_CASE("nothing to attend to gives zeros, and nothing to compute is legal") {
  auto const zeros = [](auto const& values) {
    for (auto value : values.span())
      if (static_cast<float>(value) != 0) return false;
    return true;
  };
  for (index_t width : {64, 136}) {
    inputs<bf16> const no_keys({1, 2, 0, 1, 1, width}), no_queries({1, 0, 3, 1, 1, width});
    auto const without_keys = on_cuda<bf16>(no_keys, {.causal = false}, {});
    CHECK(zeros(without_keys.out));
    CHECK(zeros(without_keys.dq));
    CHECK(without_keys.log_sum_exp(0, 0, 1) == -INFINITY);
    auto const without_queries = on_cuda<bf16>(no_queries, {.causal = false}, {});
    CHECK(zeros(without_queries.dk));
    CHECK(zeros(without_queries.dv));
  }
}

TEST_CASE("slices of one packed tensor give the bits that separate tensors give, twice") {
  exec::cuda ex;
  index_t const b = 1, t = 70, h = 4, kv = 2, d = 64, row = (h + 2 * kv) * d;
  inputs<bf16> const x({b, t, t, h, kv, d});
  tensor<bf16, 3> packed({b, t, row});
  for (index_t i = 0; i < t; ++i) {
    for (index_t e = 0; e < h * d; ++e) packed(0, i, e) = x.q.view()(0, i, e / d, e % d);
    for (index_t e = 0; e < kv * d; ++e) {
      packed(0, i, h * d + e) = x.k.view()(0, i, e / d, e % d);
      packed(0, i, (h + kv) * d + e) = x.v.view()(0, i, e / d, e % d);
    }
  }
  tensor<bf16, 3, device> on_device(packed.extents()), d_on_device(packed.extents());
  exec::copy(ex, on_device.view(), packed.view());
  auto const part = [&](tensor<bf16, 3, device>& of, index_t first, index_t heads) {
    return view<bf16, 4, device>(of.data() + first * d, {b, t, heads, d}, {t * row, row, d, 1});
  };
  tensor<bf16, 4, device> out({b, t, h, d}), d_out({b, t, h, d});
  tensor<float, 3, device> sums({b, h, t});
  exec::copy(ex, d_out.view(), x.d_out.view());
  auto const q = part(on_device, 0, h), k = part(on_device, h, kv), v = part(on_device, h + kv, kv);
  auto const separate = on_cuda<bf16>(x, {}, {});
  for (int repeat = 0; repeat < 2; ++repeat) {
    ops::attention(ex, out.view(), sums.view(), q, k, v);
    ops::attention_backward(ex, part(d_on_device, 0, h), part(d_on_device, h, kv),
                            part(d_on_device, h + kv, kv), d_out.view(), q, k, v, out.view(), sums.view());
    exec::copy(ex, packed.view(), d_on_device.view());
    auto same = true;
    for (index_t i = 0; i < t; ++i) {
      for (index_t e = 0; e < h * d; ++e)
        same = same && packed(0, i, e) == separate.dq.view()(0, i, e / d, e % d);
      for (index_t e = 0; e < kv * d; ++e)
        same = same && packed(0, i, h * d + e) == separate.dk.view()(0, i, e / d, e % d) &&
               packed(0, i, (h + kv) * d + e) == separate.dv.view()(0, i, e / d, e % d);
    }
    CHECK(same);
  }
}

TEST_CASE("large scores do not overflow") {
  sizes const s{1, 100, 100, 1, 1, 64};
  inputs<bf16> x(s);
  reference::fill_normal(x.q.span(), 1, 100.0f);
  auto const found = on_cuda(x, {}, {});
  for (auto const* values : {&found.out, &found.dq, &found.dk, &found.dv})
    for (auto value : values->span()) REQUIRE(std::isfinite(static_cast<float>(value)));
}
