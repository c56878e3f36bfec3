#include <tessera/exec/copy.hpp>

#include <doctest/doctest.h>

#include <tessera/exec/host.hpp>

#include "support/thrown.hpp"

using namespace tessera;
using test::error_of;

TEST_CASE("a copy on the host moves every element") {
  exec::host ex({.threads = 1});
  for (index_t n : {0, 1, 7, 1000}) {
    tensor<float, 1> from({n}), to({n});
    for (index_t i = 0; i < n; ++i) from(i) = static_cast<float>(i);
    exec::copy(ex, to.span(), from.span());
    for (index_t i = 0; i < n; ++i) CHECK(to(i) == static_cast<float>(i));
    exec::zero(ex, to.span());
    for (index_t i = 0; i < n; ++i) CHECK(to(i) == 0);
    exec::copy(ex, to.view(), from.view());
    if (n > 0) CHECK(to(n - 1) == static_cast<float>(n - 1));
  }
}

TEST_CASE("a copy between different counts, or with gaps, is refused") {
  exec::host ex({.threads = 1});
  tensor<float, 1> four({4}), five({5});
  CHECK(error_of<size_error>([&] { exec::copy(ex, four.span(), five.span()); }).id == "E-exec-105");
  tensor<float, 2> square({2, 4});
  auto const half = square.view().slice(1, 0, 2);
  CHECK(error_of<size_error>([&] { exec::copy(ex, half, half); }).id == "E-core-007");
}

TEST_CASE("rows are copied between matrices of other widths, and nothing beside them is written") {
  exec::host ex({.threads = 1});
  for (index_t rows : {0, 1, 4})
    for (index_t width : {0, 1, 3}) {
      tensor<float, 2> from({5, 7}), to({5, 4});
      for (index_t i = 0; i < 35; ++i) from.data()[i] = static_cast<float>(i + 1);
      auto const inner = from.view().slice(0, 0, rows).slice(1, 2, 2 + width);
      exec::copy_rows(ex, to.view().slice(0, 1, 1 + rows).slice(1, 1, 1 + width), inner);
      for (index_t i = 0; i < 5; ++i)
        for (index_t j = 0; j < 4; ++j) {
          bool const inside = i >= 1 && i < 1 + rows && j >= 1 && j < 1 + width;
          CHECK(to(i, j) == (inside ? from(i - 1, j + 1) : 0.0f));
        }
    }
  tensor<float, 2> a({3, 2}), b({2, 3});
  CHECK(error_of<size_error>([&] { exec::copy_rows(ex, a.view(), b.view()); }).id == "E-exec-110");
  view<float, 2> const turned(a.data(), {2, 3}, {1, 2});
  CHECK(error_of<size_error>([&] { exec::copy_rows(ex, b.view(), turned); }).id == "E-exec-111");
}

TEST_CASE("on the host both sides of a staged array are one") {
  exec::host ex({.threads = 1});
  memory_meter meter;
  exec::staged<std::int32_t, 2, exec::host> tokens(ex, {3, 5}, {&meter, memory_kind::data});
  CHECK(meter.current(memory_kind::data) == 60);
  tokens.host()(2, 4) = 7;
  auto const there = tokens.upload(ex);
  CHECK(there(2, 4) == 7);
  there(0, 0) = 9;
  CHECK(tokens.download(ex)(0, 0) == 9);
  CHECK(tokens.device().data() == there.data());
  CHECK(tokens.extents() == extents<2>{3, 5});
}
