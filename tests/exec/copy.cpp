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
