#include <tessera/exec/device.cuh>

#include <doctest/doctest.h>

#include <tessera/exec/copy_cuda.hpp>
#include <tessera/exec/launch.cuh>

#include "support/reference.hpp"

using namespace tessera;

namespace {
/// out = in, 16 bytes a thread, by way of shared memory, each vector turned round.
template <class T>
__global__ void reverse_vectors(T* out, T const* in) {
  auto* const memory = exec::dynamic_shared<T>();
  constexpr int n = exec::vector16<T>::count;
  auto const at = static_cast<int>(threadIdx.x) * n;
  auto v = exec::load16(in + at);
  for (int i = 0; i < n / 2; ++i) {
    auto const held = v[i];
    v[i] = v[n - 1 - i];
    v[n - 1 - i] = held;
  }
  exec::store16(memory + at, v);
  __syncthreads();
  exec::store16(out + at, exec::load16(memory + at));
}
} // namespace

TEST_CASE_TEMPLATE("sixteen bytes are moved at once, in global and in shared memory", T, float, bf16, fp16,
                   std::int32_t, double) {
  exec::cuda ex;
  constexpr int threads = 33, n = exec::vector16<T>::count;
  static_assert(sizeof(exec::vector16<T>) == 16 && alignof(exec::vector16<T>) == 16);
  tensor<T, 1> in({threads * n}), back({threads * n});
  for (index_t i = 0; i < in.size(); ++i) in(i) = T(static_cast<float>(i));
  tensor<T, 1, exec::cuda_memory> x({threads * n}), y({threads * n});
  exec::copy(ex, x.view(), in.view());
  exec::launch(ex, {.grid = exec::grid_of(1), .block = dim3(threads), .shared_bytes = threads * 16},
               reverse_vectors<T>, y.data(), x.data());
  exec::copy(ex, back.view(), y.view());
  for (int t = 0; t < threads; ++t)
    for (int i = 0; i < n; ++i)
      CHECK(static_cast<float>(back(t * n + i)) == static_cast<float>(in(t * n + n - 1 - i)));
}

namespace {
/// d = a b of 16 x 16 and 16 x 8, three times: with operands laid into registers element by element, as
/// exec/device.cuh says where they belong; with both read by load_matrix_x4, b from its transpose; and with b
/// as it is, read by load_matrix_x4_transposed.
template <class T>
__global__ void multiply_three_ways(float* d, T const* a, T const* b) {
  auto* const rows = exec::dynamic_shared<T>(); // a
  auto* const columns = rows + 256;             // the transpose of b, beside it eight columns of zeros
  auto* const depth = columns + 256;            // b, the same
  auto const lane = static_cast<int>(threadIdx.x), g = lane / 4, t = lane % 4;
  for (int i = lane; i < 256; i += 32) {
    auto const row = i / 16, column = i % 16;
    rows[i] = a[i];
    columns[i] = row < 8 ? b[column * 8 + row] : T(0.0f);
    depth[i] = column < 8 ? b[row * 8 + column] : T(0.0f);
  }
  __syncwarp();
  auto const pair = [](T low, T high) { return std::uint32_t{low.bits} | std::uint32_t{high.bits} << 16; };
  std::uint32_t const by_hand[4] = {pair(a[g * 16 + 2 * t], a[g * 16 + 2 * t + 1]),
                                    pair(a[(g + 8) * 16 + 2 * t], a[(g + 8) * 16 + 2 * t + 1]),
                                    pair(a[g * 16 + 2 * t + 8], a[g * 16 + 2 * t + 9]),
                                    pair(a[(g + 8) * 16 + 2 * t + 8], a[(g + 8) * 16 + 2 * t + 9])};
  float product[3][4] = {};
  exec::mma_16x8x16<T>(product[0], by_hand, pair(b[2 * t * 8 + g], b[(2 * t + 1) * 8 + g]),
                       pair(b[(2 * t + 8) * 8 + g], b[(2 * t + 9) * 8 + g]));
  std::uint32_t left[4], right[4];
  exec::load_matrix_x4(left, rows + lane % 16 * 16 + lane / 16 * 8);
  exec::load_matrix_x4(right, columns + (lane / 16 * 8 + lane % 8) * 16 + lane / 8 % 2 * 8);
  exec::mma_16x8x16<T>(product[1], left, right[0], right[1]);
  exec::load_matrix_x4_transposed(right, depth + lane % 16 * 16 + lane / 16 * 8);
  exec::mma_16x8x16<T>(product[2], left, right[0], right[1]);
  for (int way = 0; way < 3; ++way)
    for (int i = 0; i < 4; ++i) d[way * 128 + (g + i / 2 * 8) * 8 + 2 * t + i % 2] = product[way][i];
}

/// Two groups of copies; the first is used while the second may be on its way. Odd threads copy nothing:
/// zeros.
__global__ void copy_in_groups(float* out, float const* in) {
  __align__(16) __shared__ float first[32 * 4];
  __shared__ float second[32];
  auto const thread = static_cast<int>(threadIdx.x), other = 31 - thread;
  exec::copy_async16(first + 4 * thread, in + 4 * thread, thread % 2 == 0);
  exec::copy_async_commit();
  exec::copy_async4(second + thread, in + thread);
  exec::copy_async_commit();
  exec::copy_async_wait<1>();
  __syncthreads();
  for (int i = 0; i < 4; ++i) out[4 * thread + i] = first[4 * other + i];
  exec::copy_async_wait<0>();
  __syncthreads();
  out[128 + thread] = second[other];
}

template <class T>
__global__ void approximate(std::uint32_t* pairs, float* powers, float const* in) {
  auto const i = static_cast<int>(threadIdx.x);
  pairs[i] = exec::pack_pair<T>(in[i], -in[i]);
  powers[i] = exec::exp2_approximate(in[i]);
}
} // namespace

TEST_CASE_TEMPLATE("tensor cores multiply what lies in registers as documented", T, bf16, fp16) {
  exec::cuda ex;
  auto const a = reference::normal<T, 2>({16, 16}, 1), b = reference::normal<T, 2>({16, 8}, 2);
  tensor<T, 2, exec::cuda_memory> a_on_device(a.extents()), b_on_device(b.extents());
  tensor<float, 3, exec::cuda_memory> d_on_device({3, 16, 8});
  tensor<float, 3> d({3, 16, 8});
  exec::copy(ex, a_on_device.view(), a.view());
  exec::copy(ex, b_on_device.view(), b.view());
  exec::launch(ex, {.grid = exec::grid_of(1), .block = dim3(32), .shared_bytes = 3 * 512},
               multiply_three_ways<T>, d_on_device.data(), static_cast<T const*>(a_on_device.data()),
               static_cast<T const*>(b_on_device.data()));
  exec::copy(ex, d.view(), d_on_device.view());
  for (int way = 0; way < 3; ++way)
    for (index_t i = 0; i < 16; ++i)
      for (index_t j = 0; j < 8; ++j) {
        double sum = 0;
        for (index_t k = 0; k < 16; ++k)
          sum += static_cast<double>(static_cast<float>(a.view()(i, k))) *
                 static_cast<double>(static_cast<float>(b.view()(k, j)));
        CHECK(d(way, i, j) == doctest::Approx(sum).epsilon(1e-5));
      }
}

TEST_CASE(
    "asynchronous copies are there after their group was waited for, and zero where nothing is copied") {
  exec::cuda ex;
  auto const in = reference::normal<float, 1>({128}, 1);
  tensor<float, 1> out({160});
  tensor<float, 1, exec::cuda_memory> in_on_device({128}), out_on_device({160});
  exec::copy(ex, in_on_device.view(), in.view());
  exec::launch(ex, {.grid = exec::grid_of(1), .block = dim3(32)}, copy_in_groups, out_on_device.data(),
               static_cast<float const*>(in_on_device.data()));
  exec::copy(ex, out.view(), out_on_device.view());
  for (index_t thread = 0; thread < 32; ++thread) {
    for (index_t i = 0; i < 4; ++i)
      CHECK(out(4 * thread + i) == (thread % 2 == 0 ? 0.0f : in.view()(4 * (31 - thread) + i)));
    CHECK(out(128 + thread) == in.view()(31 - thread));
  }
}

TEST_CASE_TEMPLATE("pairs are rounded to nearest even, and powers of two are close", T, bf16, fp16) {
  exec::cuda ex;
  tensor<float, 1> in({8}), powers({8});
  float const values[] = {0.0f, 1.00390625f, 1.01171875f, 1.00048828125f, 1e-8f, 70000.0f, -150.0f, -3.7f};
  for (index_t i = 0; i < 8; ++i) in(i) = values[i];
  tensor<std::uint32_t, 1> pairs({8});
  tensor<float, 1, exec::cuda_memory> in_on_device({8}), powers_on_device({8});
  tensor<std::uint32_t, 1, exec::cuda_memory> pairs_on_device({8});
  exec::copy(ex, in_on_device.view(), in.view());
  exec::launch(ex, {.grid = exec::grid_of(1), .block = dim3(8)}, approximate<T>, pairs_on_device.data(),
               powers_on_device.data(), static_cast<float const*>(in_on_device.data()));
  exec::copy(ex, pairs.view(), pairs_on_device.view());
  exec::copy(ex, powers.view(), powers_on_device.view());
  for (index_t i = 0; i < 8; ++i) {
    CHECK((pairs(i) & 0xffffu) == T(values[i]).bits);
    CHECK((pairs(i) >> 16) == T(-values[i]).bits);
    auto const power = std::exp2(values[i]);
    CHECK((powers(i) == power || std::fabs(powers(i) - power) < 1e-6f * power ||
           (power < 0x1p-126f && powers(i) == 0)));
  }
}
