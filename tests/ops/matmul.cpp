#include <tessera/ops/matmul.hpp>

#include <tessera/exec/host.hpp>

#include <doctest/doctest.h>

#include "support/reference.hpp"

using namespace tessera;
using reference::max_relative_error;
using portable = exec::basic_host<exec::portable_product>;

namespace {

/// op(x)(i, j) in double.
template <class T>
double at(view<T, 2> x, bool transposed, index_t i, index_t j) {
  return static_cast<double>(static_cast<float>(transposed ? x(j, i) : x(i, j)));
}

template <class C, class A, class B>
std::vector<double> exact(view<C, 2> c, view<A, 2> a, view<B, 2> b, ops::matmul_options options) {
  std::vector<double> out;
  auto const k = a.extent(options.transpose_a ? 0 : 1);
  for (index_t i = 0; i < c.extent(0); ++i)
    for (index_t j = 0; j < c.extent(1); ++j) {
      double sum = options.accumulate ? at(c, false, i, j) : 0;
      for (index_t l = 0; l < k; ++l)
        sum += at(a, options.transpose_a, i, l) * at(b, options.transpose_b, l, j);
      out.push_back(sum);
    }
  return out;
}

/// The elements of a strided matrix, in order.
template <class T>
tensor<T, 2> packed(view<T, 2> x) {
  tensor<T, 2> out({x.extent(0), x.extent(1)});
  for (index_t i = 0; i < x.extent(0); ++i)
    for (index_t j = 0; j < x.extent(1); ++j) out(i, j) = x(i, j);
  return out;
}

/// A matrix whose rows lie `gap` elements apart.
template <class T>
struct spaced {
  tensor<T, 2> memory;
  view<T, 2> matrix;

  spaced(index_t rows, index_t columns, index_t gap, std::uint64_t seed)
      : memory(reference::normal<T, 2>({rows, columns + gap}, seed)),
        matrix(memory.view().slice(1, 0, columns)) {}
};

template <class C, class A, class B, class Ex>
void compare(Ex& ex, index_t m, index_t n, index_t k, index_t gap) {
  for (int form = 0; form < 8; ++form) {
    ops::matmul_options const options{
        .transpose_a = (form & 1) != 0, .transpose_b = (form & 2) != 0, .accumulate = (form & 4) != 0};
    spaced<A> a(options.transpose_a ? k : m, options.transpose_a ? m : k, gap, 1);
    spaced<B> b(options.transpose_b ? n : k, options.transpose_b ? k : n, 2 * gap, 2);
    spaced<C> c(m, n, 3 * gap, 3);
    auto const before = reference::doubles(c.memory.span());
    auto const expected = exact(c.matrix, a.matrix, b.matrix, options);
    ops::matmul(ex, c.matrix, a.matrix, b.matrix, options);
    CAPTURE(m);
    CAPTURE(n);
    CAPTURE(k);
    CAPTURE(form);
    CHECK(max_relative_error(packed(c.matrix), expected) < reference::tolerance<C>());
    for (index_t i = 0; i < m; ++i)
      for (index_t j = n; j < n + 3 * gap; ++j)
        REQUIRE(static_cast<double>(static_cast<float>(c.memory(i, j))) ==
                before[static_cast<std::size_t>(i * (n + 3 * gap) + j)]);
  }
}

struct shape {
  index_t m, n, k;
};
constexpr shape hostile[] = {{0, 3, 2},    {3, 0, 2},     {3, 4, 0},   {1, 1, 1},  {1, 37, 19},
                             {37, 1, 19},  {5, 16, 1},    {6, 16, 64}, {7, 17, 3}, {12, 33, 8},
                             {61, 67, 71}, {13, 29, 401}, {2, 53, 97}};

} // namespace

TEST_CASE_TEMPLATE("products of fp32 are those of float64, by either policy", Ex, exec::host, portable) {
  for (int threads : {1, 2}) {
    Ex ex({.threads = reference::threads(threads)});
    for (auto s : hostile)
      for (index_t gap : {0, 3}) compare<float, float, float>(ex, s.m, s.n, s.k, gap);
  }
}

TEST_CASE_TEMPLATE("storage types mix, and sums are fp32", Ex, exec::host, portable) {
  Ex ex({.threads = reference::threads(2)});
  for (auto s : {shape{1, 37, 19}, shape{7, 17, 3}, shape{61, 67, 71}, shape{13, 29, 801}, shape{3, 4, 0}}) {
    compare<bf16, bf16, bf16>(ex, s.m, s.n, s.k, 1);
    compare<float, bf16, bf16>(ex, s.m, s.n, s.k, 0);
    compare<fp16, fp16, fp16>(ex, s.m, s.n, s.k, 0);
    compare<float, fp16, fp16>(ex, s.m, s.n, s.k, 1);
    compare<bf16, float, float>(ex, s.m, s.n, s.k, 0);
    compare<float, float, bf16>(ex, s.m, s.n, s.k, 1);
    compare<bf16, bf16, float>(ex, s.m, s.n, s.k, 1);
  }
}

TEST_CASE_TEMPLATE("a product of bf16 into bf16 is rounded once, however long the sums", Ex, exec::host,
                   portable) {
  Ex ex({.threads = 1});
  index_t const k = 2000;
  auto a = reference::normal<bf16, 2>({3, k}, 1), b = reference::normal<bf16, 2>({k, 20}, 2);
  tensor<bf16, 2> c({3, 20});
  tensor<float, 2> sums({3, 20});
  ops::matmul(ex, c.view(), a.view(), b.view());
  ops::matmul(ex, sums.view(), a.view(), b.view());
  for (index_t i = 0; i < 3; ++i)
    for (index_t j = 0; j < 20; ++j) CHECK(c(i, j).bits == bf16(sums(i, j)).bits);
}

TEST_CASE_TEMPLATE("blocks larger than any cache block join up", Ex, exec::host, portable) {
  Ex ex({.threads = reference::threads(2)});
  compare<float, float, float>(ex, 151, 1051, 5, 0);
  compare<float, float, float>(ex, 9, 17, 1201, 0);
  compare<bf16, bf16, bf16>(ex, 151, 70, 11, 0);
}

TEST_CASE_TEMPLATE("rows a multiple of 4 KiB apart", Ex, exec::host, portable) {
  Ex ex({.threads = reference::threads(2)});
  auto a = reference::normal<float, 2>({8, 40}, 1), b = reference::normal<float, 2>({40, 1024}, 2);
  tensor<float, 2> c({8, 1024});
  auto const expected = exact(c.view(), a.view(), b.view(), {});
  ops::matmul(ex, c.view(), a.view(), b.view());
  CHECK(max_relative_error(c, expected) < 1e-5);
}

TEST_CASE("the portable product gives the same bits on any number of threads") {
  for (auto s : {shape{100, 203, 301}, shape{203, 50, 301}}) {
    auto a = reference::normal<float, 2>({s.m, s.k}, 1), b = reference::normal<float, 2>({s.n, s.k}, 2);
    tensor<float, 2> c[3]{tensor<float, 2>({s.m, s.n}), tensor<float, 2>({s.m, s.n}),
                          tensor<float, 2>({s.m, s.n})};
    for (int i = 0; i < 3; ++i) {
      portable ex({.threads = reference::threads(i + 1)});
      ops::matmul(ex, c[i].view(), a.view(), b.view(), {.transpose_b = true});
      CHECK(max_relative_error(c[i], reference::doubles(c[0].span())) == 0);
    }
  }
}

TEST_CASE("batches multiply index by index, and a batch of none is legal") {
  exec::host ex({.threads = reference::threads(2)});
  auto a = reference::normal<float, 3>({3, 5, 7}, 1), b = reference::normal<float, 3>({3, 4, 7}, 2);
  tensor<float, 3> c({3, 5, 4});
  ops::matmul_batched(ex, c.view(), a.view(), b.view(), {.transpose_b = true});
  for (index_t i = 0; i < 3; ++i)
    CHECK(max_relative_error(packed(c.view()[i]),
                             exact(c.view()[i], a.view()[i], b.view()[i], {.transpose_b = true})) < 1e-5);
  tensor<float, 3> none({0, 5, 4});
  CHECK_NOTHROW(ops::matmul_batched(ex, none.view(), none.view(), none.view()));
}

TEST_CASE("an overlapping operand, one row for all, is read as it says") {
  exec::host ex({.threads = 1});
  auto row = reference::normal<float, 1>({6}, 1);
  auto b = reference::normal<float, 2>({6, 5}, 2);
  view<float, 2> const repeated(row.data(), {4, 6}, {0, 1});
  tensor<float, 2> c({4, 5});
  ops::matmul(ex, c.view(), repeated, b.view());
  CHECK(max_relative_error(c, exact(c.view(), repeated, b.view(), {})) < 1e-5);
}

TEST_CASE("infinities and NaN reach the product") {
  for (int i = 0; i < 2; ++i) {
    exec::host ex({.threads = 1});
    tensor<fp16, 2> a({2, 2}), b({2, 2});
    tensor<float, 2> c({2, 2});
    a(0, 0) = fp16(i == 0 ? INFINITY : NAN);
    a(1, 1) = fp16(0x1p-24f); // the smallest subnormal
    b(0, 0) = b(1, 1) = fp16(1.0f);
    ops::matmul(ex, c.view(), a.view(), b.view());
    CHECK(!std::isfinite(c(0, 0)));
    CHECK(std::isinf(c(0, 0)) == (i == 0));
    CHECK(c(1, 1) == 0x1p-24f);
  }
}

TEST_CASE("a slower path is noted once") {
  exec::host ex({.threads = reference::threads(2)});
  auto a = reference::normal<bf16, 2>({70, 80}, 1), b = reference::normal<bf16, 2>({80, 90}, 2);
  tensor<bf16, 2> c({70, 90});
  ops::matmul(ex, c.view(), a.view(), b.view());
  auto const notes = ex.notes().size();
  ops::matmul(ex, c.view(), a.view(), b.view());
#if defined(TESSERA_WITH_ONEDNN) && defined(__x86_64__)
  if (__builtin_cpu_supports("avx512bf16") == 0) CHECK(notes == 1);
#endif
  CHECK(ex.notes().size() == notes); // said once
}

TEST_CASE("matmul refuses shapes that do not fit") {
  exec::host ex({.threads = 1});
  tensor<float, 2> a({2, 3}), b({4, 5}), c({2, 5});
  auto const id_of = [&](auto&& call) {
    try {
      call();
    } catch (size_error const& failure) {
      return std::string(failure.id());
    }
    return std::string();
  };
  CHECK(id_of([&] { ops::matmul(ex, c.view(), a.view(), b.view()); }) == "E-ops-101");
  view<float, 2> const columns(a.data(), {3, 2}, {1, 3});
  tensor<float, 2> b3({2, 5}), c3({3, 5});
  CHECK(id_of([&] { ops::matmul(ex, c3.view(), columns, b3.view()); }) == "E-ops-002");
  tensor<float, 3> two({2, 1, 1}), three({3, 1, 1});
  CHECK(id_of([&] { ops::matmul_batched(ex, two.view(), two.view(), three.view()); }) == "E-ops-102");
}
