#include <tessera/exec/elements.cuh>

#include "support/device_rows.hpp"

using namespace tessera;
using test::device_rows;
using test::lying;
using test::lyings;

// Named: what a kernel is made from must have a name outside of its file.
namespace elements_test {

// [doc: elements]
struct doubled {
  TESSERA_HOST_DEVICE void operator()(float& y, float x) const noexcept { y = 2.0f * x; }
};
// [/doc]

/// Three arrays of three types and uses.
struct mixed {
  TESSERA_HOST_DEVICE void operator()(float& a, float& b, float c) const noexcept {
    a = b + c;
    b += 1;
  }
};

/// Writes the number of each element.
struct numbered {
  template <int N>
  TESSERA_HOST_DEVICE void operator()(index_t first, float (&y)[N]) const noexcept {
    for (int i = 0; i < N; ++i) y[i] = static_cast<float>(first + i);
  }
};

tensor<float, 2> small_integers(index_t rows, index_t width) {
  tensor<float, 2> x({rows, width});
  for (index_t i = 0; i < x.size(); ++i) x.data()[i] = static_cast<float>(i % 101);
  return x;
}

} // namespace elements_test

using namespace elements_test;

TEST_CASE_TEMPLATE("each element is computed once, of any number of them, wherever the arrays lie", T, float,
                   bf16, fp16) {
  exec::cuda ex;
  for (index_t n : {0, 1, 3, 4, 5, 31, 255, 257, 4099})
    for (auto how : lyings) {
      CAPTURE(n);
      auto const x = small_integers(1, n);
      tensor<T, 2> stored({1, n});
      for (index_t i = 0; i < n; ++i) stored.data()[i] = T(x.data()[i]);
      device_rows<T> in(ex, stored, how, 0), out(ex, how, 1, 1, n);
      exec::for_elements(ex, n, doubled{}, exec::writes(out.flat().data()), exec::reads(in.flat().data()));
      auto const y = out.read(ex);
      bool right = true;
      for (index_t i = 0; i < n; ++i) right = right && static_cast<float>(y.data()[i]) == 2 * x.data()[i];
      CHECK(right);
    }
}

TEST_CASE("rows with gaps, of arrays of several types, one of them read and written") {
  exec::cuda ex;
  for (auto [rows, width] :
       {std::array<index_t, 2>{0, 8}, {3, 0}, {1, 1}, {2, 3}, {7, 129}, {40, 16}, {300, 5}})
    for (auto how : lyings) {
      CAPTURE(rows);
      CAPTURE(width);
      auto const x = small_integers(rows, width);
      tensor<bf16, 2> c({rows, width});
      for (index_t i = 0; i < x.size(); ++i) c.data()[i] = bf16(x.data()[i]);
      device_rows<float> a(ex, how, 0, rows, width), b(ex, x, how, 1);
      device_rows<bf16> in(ex, c, how, 2);
      auto const stride = [](auto& array) { return array.rows().stride(0); };
      exec::for_elements(ex, rows, width, mixed{}, exec::writes(a.rows().data(), stride(a)),
                         exec::updates(b.rows().data(), stride(b)),
                         exec::reads(in.rows().data(), stride(in)));
      auto const sums = a.read(ex), more = b.read(ex);
      bool right = true;
      for (index_t i = 0; i < x.size(); ++i)
        right = right && sums.data()[i] == 2 * x.data()[i] && more.data()[i] == x.data()[i] + 1;
      CHECK(right);
    }
}

TEST_CASE("a function of packs is told the numbers of its elements, row by row") {
  exec::cuda ex;
  for (auto how : lyings) {
    device_rows<float> out(ex, how, 1, 5, 37);
    exec::for_elements(ex, 5, 37, numbered{}, exec::writes(out.rows().data(), out.rows().stride(0)));
    auto const y = out.read(ex);
    bool right = true;
    for (index_t i = 0; i < y.size(); ++i) right = right && y.data()[i] == static_cast<float>(i);
    CHECK(right);
  }
}
