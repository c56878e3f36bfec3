#include <tessera/exec/copy_cuda.hpp>

#include <doctest/doctest.h>

#include <tessera/exec/launch.cuh>

#include "support/cuda.hpp"
#include "support/reference.hpp"
#include "support/thrown.hpp"

using namespace tessera;
using test::error_of;

namespace {
__global__ void double_all(float* x, index_t n) {
  for (auto i = index_t{blockIdx.x} * blockDim.x + threadIdx.x; i < n; i += index_t{gridDim.x} * blockDim.x)
    x[i] *= 2.0f;
}
} // namespace

TEST_CASE("what goes to the device and back is the same, of any size, as spans and as views") {
  exec::cuda ex;
  for (index_t n : {0, 1, 7, 1000}) {
    auto const from = reference::normal<float, 1>({n}, 1);
    tensor<float, 1, exec::cuda_memory> there({n}), also_there({n});
    exec::copy(ex, there.span(), from.span());
    exec::copy(ex, also_there.span(), there.span());
    tensor<float, 1> back({n}), again({n});
    exec::copy(ex, back.span(), also_there.span());
    exec::copy(ex, again.view(), there.view());
    for (index_t i = 0; i < n; ++i) CHECK((back(i) == from(i) && again(i) == from(i)));
    exec::zero(ex, there.span());
    exec::copy(ex, back.span(), there.span());
    for (index_t i = 0; i < n; ++i) CHECK(back(i) == 0.0f);
  }
}

TEST_CASE("copies are in order with kernels, and pinned memory does not wait") {
  exec::cuda ex;
  tensor<float, 1, exec::pinned_memory> host({100}), result({100});
  tensor<float, 1, exec::cuda_memory> there({100});
  for (index_t i = 0; i < 100; ++i) host(i) = static_cast<float>(i);
  exec::copy(ex, there.view(), host.view());
  for (int times = 0; times < 3; ++times)
    exec::launch(ex, {.grid = exec::grid_of(2), .block = dim3(64)}, double_all, there.data(), index_t{100});
  exec::copy(ex, result.view(), there.view());
  ex.synchronize();
  for (index_t i = 0; i < 100; ++i) CHECK(result(i) == 8.0f * static_cast<float>(i));
}

TEST_CASE("different counts and views with gaps are refused") {
  exec::cuda ex;
  tensor<float, 1> four({4});
  tensor<float, 1, exec::cuda_memory> five({5});
  CHECK(error_of<size_error>([&] { exec::copy(ex, five.span(), four.span()); }).id == "E-exec-105");
  CHECK(error_of<size_error>([&] { exec::copy(ex, four.view(), five.view()); }).id == "E-exec-105");
  tensor<float, 2, exec::cuda_memory> square({4, 4});
  tensor<float, 2> host({4, 2});
  auto const half = square.view().slice(1, 0, 2);
  CHECK(error_of<size_error>([&] { exec::copy(ex, half, host.view()); }).id == "E-core-007");
}

TEST_CASE("rows are copied between matrices of other widths, and nothing beside them is written") {
  exec::cuda ex;
  for (index_t rows : {0, 1, 4})
    for (index_t width : {0, 1, 3}) {
      auto const values = reference::normal<bf16, 2>({5, 7}, 1);
      tensor<bf16, 2, exec::cuda_memory> from({5, 7}), to({5, 4});
      exec::copy(ex, from.view(), values.view());
      exec::copy_rows(ex, to.view().slice(0, 1, 1 + rows).slice(1, 1, 1 + width),
                      from.view().slice(0, 0, rows).slice(1, 2, 2 + width));
      tensor<bf16, 2> back({5, 4});
      exec::copy(ex, back.view(), to.view());
      for (index_t i = 0; i < 5; ++i)
        for (index_t j = 0; j < 4; ++j) {
          bool const inside = i >= 1 && i < 1 + rows && j >= 1 && j < 1 + width;
          CHECK(back(i, j) == (inside ? values(i - 1, j + 1) : bf16(0.0f)));
        }
    }
}

TEST_CASE("a staged array is filled on the host, used on the device, and filled again at once") {
  exec::cuda ex;
  memory_meter meter;
  exec::staged<float, 2, exec::cuda> x(ex, {3, 5}, {&meter, memory_kind::data});
  CHECK(meter.current(memory_kind::data) == 120);
  tensor<float, 1, exec::cuda_memory> results({4 * 15});
  for (int round = 0; round < 4; ++round) {
    auto const host = x.host();
    for (index_t i = 0; i < 15; ++i) host.data()[i] = static_cast<float>(round * 100 + i);
    auto const there = x.upload(ex);
    exec::launch(ex, {.grid = exec::grid_of(1), .block = dim3(32)}, double_all, there.data(), index_t{15});
    exec::copy(ex, results.span().subspan(static_cast<std::size_t>(round) * 15, 15), there.span());
  }
  tensor<float, 1> back({60});
  exec::copy(ex, back.span(), results.span());
  for (int round = 0; round < 4; ++round)
    for (index_t i = 0; i < 15; ++i)
      CHECK(back(round * 15 + i) == 2.0f * static_cast<float>(round * 100 + i));
  CHECK(x.download(ex)(2, 4) == 2.0f * 314.0f);
  CHECK(x.extents() == extents<2>{3, 5});
}

TEST_CASE("the tests' arrays keep their rows and see what is written beside them") {
  exec::cuda ex;
  auto const from = reference::normal<bf16, 3>({2, 3, 5}, 3);
  for (auto where : {test::placement{}, test::placement{1, 0}, test::placement{3, 7}}) {
    test::on_device<bf16, 3> x(ex, from, where);
    CHECK(x.view().stride(1) == 5 + where.gap);
    CHECK(x.view().stride(0) == 3 * (5 + where.gap));
    auto const back = x.read(ex);
    for (index_t i = 0; i < from.size(); ++i) CHECK(back.data()[i].bits == from.data()[i].bits);
  }
}
