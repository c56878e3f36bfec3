#include <tessera/ops/cuda/matmul.cuh>

#include <doctest/doctest.h>

#include "support/cuda.hpp"
#include "support/reference.hpp"
#include "support/thrown.hpp"
#if defined(TESSERA_CUDA_EMULATION)
#include <cuda_emulation/control.hpp>
#include <cuda_emulation/cublaslt.hpp>
#endif

using namespace tessera;
using reference::max_relative_error;
using test::on_device;
using test::placement;

namespace {

template <class T>
double at(tensor<T, 2> const& x, bool transposed, index_t i, index_t j) {
  return static_cast<double>(static_cast<float>(transposed ? x(j, i) : x(i, j)));
}

template <class C, class A, class B>
std::vector<double> exact(tensor<C, 2> const& c, tensor<A, 2> const& a, tensor<B, 2> const& b,
                          ops::matmul_options options) {
  std::vector<double> out;
  auto const k = a.extent(options.transpose_a ? 0 : 1);
  for (index_t i = 0; i < c.extent(0); ++i)
    for (index_t j = 0; j < c.extent(1); ++j) {
      auto sum = options.accumulate ? at(c, false, i, j) : 0.0;
      for (index_t l = 0; l < k; ++l)
        sum += at(a, options.transpose_a, i, l) * at(b, options.transpose_b, l, j);
      out.push_back(sum);
    }
  return out;
}

struct shape {
  index_t m, n, k;
};

/// All eight forms of a product, its matrices placed as asked.
template <class C, class A, class B>
void compare(exec::cuda& ex, shape s, placement in, placement out) {
  for (int form = 0; form < 8; ++form) {
    ops::matmul_options const options{
        .transpose_a = (form & 1) != 0, .transpose_b = (form & 2) != 0, .accumulate = (form & 4) != 0};
    auto const a =
        reference::normal<A, 2>(options.transpose_a ? extents<2>{s.k, s.m} : extents<2>{s.m, s.k}, 1);
    auto const b =
        reference::normal<B, 2>(options.transpose_b ? extents<2>{s.n, s.k} : extents<2>{s.k, s.n}, 2);
    auto const c = reference::normal<C, 2>({s.m, s.n}, 3);
    on_device<A, 2> device_a(ex, a, in);
    on_device<B, 2> device_b(ex, b, in);
    on_device<C, 2> device_c(ex, c, out);
    ops::matmul(ex, device_c.view(), device_a.view(), device_b.view(), options);
    CAPTURE(s.m);
    CAPTURE(s.n);
    CAPTURE(s.k);
    CAPTURE(form);
    CHECK(max_relative_error(device_c.read(ex), exact(c, a, b, options)) < reference::tolerance<C>());
  }
}

template <class C, class A, class B>
void compare(exec::cuda& ex) {
  for (auto s : {shape{1, 1, 1}, {1, 9, 5}, {7, 1, 3}, {3, 5, 1}, {17, 31, 13}, {8, 64, 40}}) {
    compare<C, A, B>(ex, s, {}, {});
    compare<C, A, B>(ex, s, {.offset = 1, .gap = 3}, {.offset = 5, .gap = 2});
  }
}

} // namespace

TEST_CASE("products on CUDA are those of float64, for every form, type, stride and alignment") {
  exec::cuda ex;
  compare<float, float, float>(ex);
  compare<bf16, bf16, bf16>(ex);
  compare<float, bf16, bf16>(ex);
  compare<fp16, fp16, fp16>(ex);
}

TEST_CASE("types that cuBLASLt does not mix are multiplied all the same") {
  exec::cuda ex;
  compare<float, bf16, float>(ex, {5, 6, 7}, {}, {.gap = 1});
  compare<float, fp16, bf16>(ex, {5, 6, 7}, {.offset = 1}, {});
  compare<bf16, float, float>(ex, {5, 6, 7}, {.gap = 3}, {.offset = 3});
  compare<fp16, bf16, bf16>(ex, {5, 6, 7}, {}, {});
}

TEST_CASE("products of nothing are zero, or what was there, and products without elements are legal") {
  exec::cuda ex;
  compare<float, float, float>(ex, {3, 4, 0}, {}, {.gap = 2});
  compare<bf16, bf16, bf16>(ex, {3, 4, 0}, {}, {});
  compare<float, float, float>(ex, {0, 4, 5}, {}, {});
  compare<float, float, float>(ex, {4, 0, 5}, {}, {});
}

TEST_CASE("the next product of a shape that is known takes no memory and chooses nothing anew") {
  exec::cuda ex;
  on_device<bf16, 2> a(ex, reference::normal<bf16, 2>({16, 64}, 1)),
      b(ex, reference::normal<bf16, 2>({64, 8}, 2));
  on_device<bf16, 2> c(ex, {16, 8});
  on_device<float, 2> mixed(ex, reference::normal<float, 2>({64, 8}, 3));
  auto const run = [&] {
    ops::matmul(ex, c.view(), a.view(), b.view());
    ops::matmul(ex, c.view(), a.view(), mixed.view());
  };
  run();
  auto const plans = ex.handle<ops::cuda_detail::cublaslt>().plans();
  auto const allocations = ex.scratch().allocations();
  run();
  ex.synchronize();
  CHECK(plans == 2);
  CHECK(ex.handle<ops::cuda_detail::cublaslt>().plans() == plans);
  CHECK(ex.scratch().allocations() == allocations);
}

TEST_CASE("a batch is one call, index by index") {
  exec::cuda ex;
  for (bool accumulate : {false, true}) {
    auto const a = reference::normal<float, 3>({3, 5, 7}, 1), b = reference::normal<float, 3>({3, 4, 7}, 2),
               c = reference::normal<float, 3>({3, 5, 4}, 3);
    on_device<float, 3> device_a(ex, a, {.offset = 2, .gap = 1}), device_b(ex, b),
        device_c(ex, c, {.gap = 3});
#if defined(TESSERA_CUDA_EMULATION)
    auto const products = cuda_emulation::products_started(),
               matrices = cuda_emulation::matrices_multiplied();
#endif
    ops::matmul_batched(ex, device_c.view(), device_a.view(), device_b.view(),
                        {.transpose_b = true, .accumulate = accumulate});
#if defined(TESSERA_CUDA_EMULATION)
    CHECK(cuda_emulation::products_started() == products + 1);
    CHECK(cuda_emulation::matrices_multiplied() == matrices + 3);
#endif
    exec::host host({.threads = 1});
    auto expected = reference::normal<float, 3>({3, 5, 4}, 3);
    ops::matmul_batched(host, expected.view(), a.view(), b.view(),
                        {.transpose_b = true, .accumulate = accumulate});
    CHECK(max_relative_error(device_c.read(ex), reference::doubles(expected.span())) < 1e-5);
  }
  on_device<float, 3> none(ex, {0, 5, 4});
  CHECK_NOTHROW(ops::matmul_batched(ex, none.view(), none.view(), none.view()));
}

TEST_CASE("one matrix may serve a whole batch, one row all rows") {
  exec::cuda ex;
  auto const a = reference::normal<float, 2>({5, 7}, 1), b = reference::normal<float, 2>({7, 4}, 2);
  on_device<float, 2> device_a(ex, a), device_b(ex, b);
  on_device<float, 3> c(ex, {2, 5, 4});
  test::device_view<float, 3> const same_a(device_a.view().data(), {2, 5, 7}, {0, 7, 1}),
      same_b(device_b.view().data(), {2, 7, 4}, {0, 4, 1});
  ops::matmul_batched(ex, c.view(), same_a, same_b);
  auto const product = exact(tensor<float, 2>({5, 4}), a, b, {});
  auto twice = product;
  twice.insert(twice.end(), product.begin(), product.end());
  CHECK(max_relative_error(c.read(ex), twice) < 1e-5);

  on_device<float, 2> rows(ex, {3, 4});
  test::device_view<float, 2> const repeated(device_a.view().data(), {3, 7}, {0, 1});
  ops::matmul(ex, rows.view(), repeated, device_b.view());
  auto const got = rows.read(ex);
  for (index_t i = 0; i < 3; ++i)
    for (index_t j = 0; j < 4; ++j)
      CHECK(static_cast<double>(got(i, j)) ==
            doctest::Approx(product[static_cast<std::size_t>(j)]).epsilon(1e-5));
}

TEST_CASE("infinities and NaN reach the product") {
  exec::cuda ex;
  for (auto value : {INFINITY, NAN}) {
    tensor<fp16, 2> a({2, 2}), b({2, 2});
    a(0, 0) = fp16(value);
    a(1, 1) = fp16(0x1p-24f); // the smallest subnormal
    b(0, 0) = b(1, 1) = fp16(1.0f);
    on_device<fp16, 2> device_a(ex, a), device_b(ex, b);
    on_device<float, 2> c(ex, {2, 2});
    ops::matmul(ex, c.view(), device_a.view(), device_b.view());
    auto const got = c.read(ex);
    CHECK(!std::isfinite(got(0, 0)));
    CHECK(std::isinf(got(0, 0)) == std::isinf(value));
    CHECK(got(1, 1) == 0x1p-24f);
  }
}

TEST_CASE("matmul on CUDA refuses shapes that do not fit, as on the host") {
  exec::cuda ex;
  on_device<float, 2> a(ex, {2, 3}), b(ex, {4, 5}), c(ex, {2, 5});
  on_device<float, 3> two(ex, {2, 1, 1}), three(ex, {3, 1, 1});
  CHECK(test::error_of<size_error>([&] { ops::matmul(ex, c.view(), a.view(), b.view()); }).id == "E-ops-101");
  CHECK(test::error_of<size_error>([&] {
          ops::matmul_batched(ex, two.view(), two.view(), three.view());
        }).id == "E-ops-102");
}

#if defined(TESSERA_CUDA_EMULATION)
TEST_CASE("each of cuBLASLt's return codes is looked at") {
  auto const run = [] {
    exec::cuda ex;
    on_device<float, 2> a(ex, {8, 64}), b(ex, {64, 8}), c(ex, {8, 8});
    // Failures from here on: the first product makes the handle, the descriptors and the plan.
    for (index_t call = 0; call < 200; ++call) {
      cuda_emulation::fail_call(call, cudaErrorUnknown);
      auto const failure =
          test::error_of<library_error>([&] { ops::matmul(ex, c.view(), a.view(), b.view()); });
      cuda_emulation::fail_call(-1, cudaSuccess);
      if (failure.id == "nothing was thrown") return call;
      CHECK((failure.id == "E-ops-107" || failure.id == "E-exec-101"));
    }
    return index_t{-1};
  };
  CHECK(run() >= 10);
  CHECK(cuda_emulation::take_unchecked_errors().empty());
  CHECK(cuda_emulation::cublaslt_objects() == 0);
}
#endif
