// Right kernels give right results, and no fault is found in them.
#include "fixture.hpp"

#include <numeric>
#include <set>

#include <cub/cub.cuh>

using namespace fixture;

namespace {

__global__ void write_indices(uint3* threads, uint3* blocks) {
  auto const block = (blockIdx.z * gridDim.y + blockIdx.y) * gridDim.x + blockIdx.x;
  auto const thread = (threadIdx.z * blockDim.y + threadIdx.y) * blockDim.x + threadIdx.x;
  auto const i = block * (blockDim.x * blockDim.y * blockDim.z) + thread;
  threads[i] = {threadIdx.x, threadIdx.y, threadIdx.z};
  blocks[i] = {blockIdx.x, blockIdx.y, blockIdx.z};
}

template <class T>
__global__ void reverse(T* out, T const* in) {
  __shared__ T staged[256];
  auto const i = threadIdx.x;
  staged[i] = in[i];
  __syncthreads();
  out[i] = staged[blockDim.x - 1 - i];
}

/// Reuses its shared memory with barriers on both sides.
__global__ void sum_in_a_tree(float* out, float const* in, int rounds) {
  auto* const sums = static_cast<float*>(cuda_emulation::dynamic_shared_memory());
  for (int r = 0; r < rounds; ++r) {
    sums[threadIdx.x] = in[blockIdx.x * blockDim.x + threadIdx.x];
    __syncthreads();
    for (auto width = blockDim.x / 2; width > 0; width /= 2) {
      if (threadIdx.x < width) sums[threadIdx.x] += sums[threadIdx.x + width];
      __syncthreads();
    }
    if (threadIdx.x == 0) out[blockIdx.x] = sums[0];
    __syncthreads();
  }
}

__global__ void shuffles(int* out) {
  int const lane = static_cast<int>(threadIdx.x % 32);
  int* const mine = out + threadIdx.x * 8;
  mine[0] = __shfl_sync(~0u, lane, 5);
  mine[1] = __shfl_up_sync(~0u, lane, 3);
  mine[2] = __shfl_down_sync(~0u, lane, 3);
  mine[3] = __shfl_xor_sync(~0u, lane, 9);
  mine[4] = __shfl_down_sync(~0u, lane, 3, 8);
  mine[5] = static_cast<int>(__ballot_sync(~0u, lane % 3 == 0));
  mine[6] = __any_sync(~0u, lane == 40) + 2 * __all_sync(~0u, lane < 32) + 4 * __any_sync(~0u, lane == 7);
  mine[7] = static_cast<int>(__shfl_sync(~0u, 1.5 * lane, lane / 2) * 2);
}

/// Halves of a warp that do not wait for each other.
__global__ void halves(int* out) {
  auto const lane = threadIdx.x;
  unsigned const mask = lane < 16 ? 0x0000ffffu : 0xffff0000u;
  int value = static_cast<int>(lane);
  int const turns = lane < 16 ? 4 : 3;
  for (int i = 0; i < turns; ++i) value += __shfl_xor_sync(mask, value, 1 << i);
  out[lane] = value;
}

__global__ void exchange_in_a_warp(int* out) {
  __shared__ int values[64];
  auto const warp = threadIdx.x / 32 * 32, lane = threadIdx.x % 32;
  for (int turn = 0; turn < 5; ++turn) {
    values[threadIdx.x] = static_cast<int>(threadIdx.x) + turn;
    __syncwarp();
    out[threadIdx.x] = values[warp + (lane + 1) % 32];
    __syncwarp();
  }
}

__global__ void count_atomically(int* total, int* per_value, unsigned* greatest, float* float_sum) {
  __shared__ int counts[4];
  if (threadIdx.x < 4) counts[threadIdx.x] = 0;
  __syncthreads();
  atomicAdd(&counts[threadIdx.x % 4], 1);
  __syncthreads();
  if (threadIdx.x < 4) atomicAdd(&per_value[threadIdx.x], counts[threadIdx.x]);
  atomicAdd(total, 1);
  atomicMax(greatest, blockIdx.x * blockDim.x + threadIdx.x);
  atomicAdd(float_sum, 0.5f);
}

/// Two bytes side by side belong to different threads.
__global__ void narrow_elements(unsigned short* out) {
  __shared__ unsigned short values[64];
  __shared__ bool flags[64];
  values[threadIdx.x] = static_cast<unsigned short>(threadIdx.x);
  flags[threadIdx.x] = threadIdx.x % 2 == 0;
  __syncthreads();
  auto const other = 63 - threadIdx.x;
  out[threadIdx.x] = static_cast<unsigned short>(values[other] + (flags[other] ? 100 : 0));
}

__global__ void barriers_that_count(int* out) {
  bool const third = threadIdx.x % 3 == 0;
  auto const count = __syncthreads_count(third);
  auto const any = __syncthreads_or(threadIdx.x == 1000), all = __syncthreads_and(threadIdx.x < 1000);
  out[threadIdx.x] = count * 4 + (any != 0) * 2 + (all != 0);
}

template <int Threads>
__global__ void with_cub(float* sums, int* scans, int n) {
  using reduce = cub::BlockReduce<float, Threads>;
  using scan = cub::BlockScan<int, Threads>;
  __shared__ union {
    typename reduce::TempStorage of_reduce;
    typename scan::TempStorage of_scan;
  } storage;
  auto const i = static_cast<int>(threadIdx.x);
  auto const sum = reduce(storage.of_reduce).Sum(static_cast<float>(i), n);
  __syncthreads();
  auto const greatest = reduce(storage.of_reduce).Reduce(static_cast<float>(i ^ 5), cub::Max{});
  __syncthreads();
  if (i == 0) sums[0] = sum, sums[1] = greatest;
  int before = 0, total = 0;
  scan(storage.of_scan).ExclusiveSum(i, before, total);
  scans[i] = before;
  __syncthreads();
  int with = 0;
  scan(storage.of_scan).InclusiveSum(i, with);
  scans[Threads + i] = with;
  if (i == 0) scans[2 * Threads] = total;
}

__global__ void warp_sums(float* out) {
  __shared__ cub::WarpReduce<float, 8>::TempStorage storage;
  auto const sum = cub::WarpReduce<float, 8>(storage).Sum(static_cast<float>(threadIdx.x));
  if (threadIdx.x % 8 == 0) out[threadIdx.x / 8] = sum;
}

struct parameters {
  int n;
  float factor;
  float* out;
};
__global__ void by_value(parameters p, float const* in) {
  for (auto i = static_cast<int>(threadIdx.x); i < p.n; i += static_cast<int>(blockDim.x))
    p.out[i] = p.factor * in[i];
}

/// The block that comes last adds what the others left.
__global__ void last_block_adds(float* partial, unsigned* arrived, float* out) {
  if (threadIdx.x == 0) partial[blockIdx.x] = static_cast<float>(blockIdx.x + 1);
  __threadfence();
  __shared__ bool last;
  if (threadIdx.x == 0) last = atomicAdd(arrived, 1) == gridDim.x - 1;
  __syncthreads();
  if (last && threadIdx.x == 0) {
    __threadfence();
    float sum = 0;
    for (unsigned b = 0; b < gridDim.x; ++b) sum += partial[b];
    *out = sum;
  }
}

} // namespace

TEST_CASE("each thread of each block runs once and knows its place") {
  dim3 const grid(3, 2, 2), block(5, 3, 2);
  auto const count = std::size_t{3 * 2 * 2 * 5 * 3 * 2};
  array<uint3> threads(count), blocks(count);
  finds_nothing([&] {
    CHECK(launch({grid, block}, write_indices, threads.data(), blocks.data()) == cudaSuccess);
  });
  auto const t = threads.values(), b = blocks.values();
  std::set<std::vector<unsigned>> seen;
  for (std::size_t i = 0; i < count; ++i) {
    CHECK(t[i].x < 5);
    CHECK(t[i].z < 2);
    CHECK(b[i].y < 2);
    seen.insert({t[i].x, t[i].y, t[i].z, b[i].x, b[i].y, b[i].z});
  }
  CHECK(seen.size() == count);
}

TEST_CASE_TEMPLATE("threads read what others left in shared memory before a barrier", T, unsigned char, short,
                   float, double, float4) {
  for (unsigned threads : {1u, 31u, 32u, 33u, 256u}) {
    std::vector<T> values(threads);
    for (unsigned i = 0; i < threads; ++i) std::memcpy(&values[i], &i, std::min(sizeof(T), sizeof(i)));
    if constexpr (sizeof(T) == 16)
      for (unsigned i = 0; i < threads; ++i) values[i] = make_float4(1, 2, 3, static_cast<float>(i));
    array<T> in(values), out(values.size());
    finds_nothing([&] { CHECK(launch({1, threads}, reverse<T>, out.data(), in.data()) == cudaSuccess); });
    auto const result = out.values();
    for (unsigned i = 0; i < threads; ++i)
      CHECK(std::memcmp(&result[i], &values[threads - 1 - i], sizeof(T)) == 0);
  }
}

TEST_CASE("dynamic shared memory is each block's own, and can be used again after a barrier") {
  array<float> in(counting(4 * 128)), out(4);
  finds_nothing([&] {
    CHECK(launch({4, 128, 128 * sizeof(float)}, sum_in_a_tree, out.data(), in.data(), 3) == cudaSuccess);
  });
  auto const sums = out.values();
  for (int b = 0; b < 4; ++b) CHECK(sums[b] == 128 * 128 * b + 127 * 64);
}

TEST_CASE("lanes exchange values and vote") {
  array<int> out(64 * 8);
  finds_nothing([&] { CHECK(launch({1, 64}, shuffles, out.data()) == cudaSuccess); });
  auto const values = out.values();
  unsigned thirds = 0;
  for (int i = 0; i < 32; i += 3) thirds |= 1u << i;
  for (int t = 0; t < 64; ++t) {
    auto const* const mine = values.data() + t * 8;
    int const lane = t % 32;
    CHECK(mine[0] == 5);
    CHECK(mine[1] == (lane < 3 ? lane : lane - 3));
    CHECK(mine[2] == (lane < 29 ? lane + 3 : lane));
    CHECK(mine[3] == (lane ^ 9));
    CHECK(mine[4] == (lane % 8 < 5 ? lane + 3 : lane));
    CHECK(static_cast<unsigned>(mine[5]) == thirds);
    CHECK(mine[6] == 6);
    CHECK(mine[7] == lane / 2 * 3);
  }
}

TEST_CASE("lanes with different masks go their own ways") {
  array<int> out(32);
  finds_nothing([&] { CHECK(launch({1, 32}, halves, out.data()) == cudaSuccess); });
  auto const values = out.values();
  for (int i = 0; i < 16; ++i) CHECK(values[i] == 15 * 8);
  for (int i = 16; i < 24; ++i) CHECK(values[i] == 4 * (16 + 23));
  for (int i = 24; i < 32; ++i) CHECK(values[i] == 4 * (24 + 31));
}

TEST_CASE("a warp's own barrier orders what its lanes do in shared memory") {
  array<int> out(64);
  finds_nothing([&] { CHECK(launch({1, 64}, exchange_in_a_warp, out.data()) == cudaSuccess); });
  auto const values = out.values();
  for (int t = 0; t < 64; ++t) CHECK(values[t] == t / 32 * 32 + (t + 1) % 32 + 4);
}

TEST_CASE("atomic operations of all blocks add up") {
  array<int> total(std::vector<int>{0}), per_value(std::vector<int>(4));
  array<unsigned> greatest(std::vector<unsigned>{0});
  array<float> float_sum(std::vector<float>{0});
  finds_nothing([&] {
    CHECK(launch({5, 60}, count_atomically, total.data(), per_value.data(), greatest.data(),
                 float_sum.data()) == cudaSuccess);
  });
  CHECK(total.values()[0] == 300);
  CHECK(per_value.values() == std::vector<int>{75, 75, 75, 75});
  CHECK(greatest.values()[0] == 299);
  CHECK(float_sum.values()[0] == 150);
}

TEST_CASE("neighbouring bytes of different threads are no race") {
  array<unsigned short> out(64);
  finds_nothing([&] { CHECK(launch({1, 64}, narrow_elements, out.data()) == cudaSuccess); });
  auto const values = out.values();
  for (int t = 0; t < 64; ++t) CHECK(values[t] == 63 - t + ((63 - t) % 2 == 0 ? 100 : 0));
}

TEST_CASE("barriers count, and tell whether any or all agree") {
  array<int> out(100);
  finds_nothing([&] { CHECK(launch({1, 100}, barriers_that_count, out.data()) == cudaSuccess); });
  for (int value : out.values()) CHECK(value == 34 * 4 + 1);
}

TEST_CASE("the pieces of CUB reduce and scan") {
  array<float> sums(2), of_groups(8);
  array<int> scans(201), scans_of_64(129);
  finds_nothing([&] {
    CHECK(launch({1, 100}, with_cub<100>, sums.data(), scans.data(), 50) == cudaSuccess);
    CHECK(launch({1, 64}, warp_sums, of_groups.data()) == cudaSuccess);
  });
  CHECK(sums.values() == std::vector<float>{49 * 25, 103});
  auto const s = scans.values();
  for (int i = 0; i < 100; ++i) {
    CHECK(s[i] == i * (i - 1) / 2);
    CHECK(s[100 + i] == i * (i + 1) / 2);
  }
  CHECK(s[200] == 4950);
  auto const g = of_groups.values();
  for (int i = 0; i < 8; ++i) CHECK(g[i] == 64 * i + 28);
}

TEST_CASE("a device sorts pairs by a range of the key's bits, and keeps the order of equal ones") {
  std::vector<unsigned> const keys{0x105, 0x203, 0x305, 0x001, 0x403};
  array<unsigned> in(keys), out(5);
  array<int> values_in(counting<int>(5)), values_out(5);
  std::size_t bytes = 0;
  CHECK(cub::DeviceRadixSort::SortPairs(nullptr, bytes, in.data(), out.data(), values_in.data(),
                                        values_out.data(), 5, 0, 8) == cudaSuccess);
  array<char> scratch(bytes);
  CHECK(cub::DeviceRadixSort::SortPairs(scratch.data(), bytes, in.data(), out.data(), values_in.data(),
                                        values_out.data(), 5, 0, 8) == cudaSuccess);
  CHECK(values_out.values() == std::vector<int>{3, 1, 4, 0, 2});
  CHECK(out.values() == std::vector<unsigned>{0x001, 0x203, 0x403, 0x105, 0x305});
}

TEST_CASE("kernels take structures by value") {
  array<float> in(counting(70)), out(70);
  finds_nothing([&] {
    CHECK(launch({1, 32}, by_value, parameters{70, 3.0f, out.data()}, in.data()) == cudaSuccess);
  });
  auto const values = out.values();
  for (int i = 0; i < 70; ++i) CHECK(values[i] == 3.0f * i);
}

TEST_CASE("a fence and an atomic counter hand results from block to block") {
  for (bool backwards : {false, true}) {
    cuda_emulation::run_blocks_backwards(backwards);
    array<float> partial(7), out(1);
    array<unsigned> arrived(std::vector<unsigned>{0});
    finds_nothing([&] {
      CHECK(launch({7, 32}, last_block_adds, partial.data(), arrived.data(), out.data()) == cudaSuccess);
    });
    CHECK(out.values()[0] == 28);
  }
  cuda_emulation::run_blocks_backwards(false);
}
