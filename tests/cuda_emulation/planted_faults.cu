// Each fault that the emulation claims to find is planted here, beside the right version of the same code.
#include "fixture.hpp"

#include <cstdlib>

#include <cub/block/block_reduce.cuh>

#include <tessera/exec/device.cuh>

#include <sys/wait.h>
#include <unistd.h>

using namespace fixture;

namespace {

// ---- barriers --------------------------------------------------------------------------------------------

/// `barrier`: between the steps of a sum.
__global__ void tree(float* out, float const* in, bool barrier) {
  __shared__ float sums[128];
  sums[threadIdx.x] = in[threadIdx.x];
  __syncthreads();
  for (unsigned width = 64; width > 0; width /= 2) {
    if (threadIdx.x < width) sums[threadIdx.x] += sums[threadIdx.x + width];
    if (barrier) __syncthreads();
  }
  if (threadIdx.x == 0) *out = sums[0];
}

__global__ void overwritten_too_early(float* out, float const* in, bool barrier) {
  __shared__ float values[64];
  for (int turn = 0; turn < 2; ++turn) {
    values[threadIdx.x] = in[threadIdx.x];
    __syncthreads();
    out[threadIdx.x] = values[63 - threadIdx.x];
    if (barrier) __syncthreads();
  }
}

__global__ void storage_used_again(float* out, bool barrier) {
  using reduce = cub::BlockReduce<float, 64>;
  __shared__ reduce::TempStorage storage;
  auto const a = reduce(storage).Sum(1.0f);
  if (barrier) __syncthreads();
  auto const b = reduce(storage).Sum(2.0f);
  if (threadIdx.x == 0) *out = a + b;
}

__global__ void neighbours_of_a_warp(int* out, bool barrier) {
  __shared__ int values[32];
  values[threadIdx.x] = 0;
  __syncwarp();
  values[threadIdx.x] = static_cast<int>(threadIdx.x);
  if (barrier) __syncwarp();
  out[threadIdx.x] = values[31 - threadIdx.x];
}

/// The barrier of half a warp does not order the other half.
__global__ void half_a_barrier(int* out, unsigned mask) {
  __shared__ int values[32];
  values[threadIdx.x] = 0;
  __syncwarp();
  values[threadIdx.x] = 1;
  __syncwarp(mask == ~0u ? mask : threadIdx.x < 16 ? 0x0000ffffu : 0xffff0000u);
  out[threadIdx.x] = values[31 - threadIdx.x];
}

/// A shuffle orders nothing.
__global__ void shuffled_instead(int* out) {
  __shared__ int values[32];
  values[threadIdx.x] = 0;
  __syncwarp();
  values[threadIdx.x] = 1;
  (void)__shfl_sync(~0u, 0, 0);
  out[threadIdx.x] = values[31 - threadIdx.x];
}

__global__ void atomic_and_plain(int* out, bool barrier) {
  __shared__ int count;
  if (threadIdx.x == 0) count = 0;
  __syncthreads();
  atomicAdd(&count, 1);
  if (barrier) __syncthreads();
  if (threadIdx.x == 0) *out = count;
}

__global__ void some_do_not_come(int* out, int which) {
  switch (which) {
  case 0: // ended
    if (threadIdx.x >= 40) return;
    __syncthreads();
    break;
  case 1: // at another barrier
    if (threadIdx.x >= 40)
      __syncthreads();
    else
      __syncthreads();
    break;
  case 2: // in a warp operation that waits for those at the barrier
    if (threadIdx.x % 32 < 16)
      __syncthreads();
    else
      __syncwarp();
    break;
  default:
    __syncthreads();
  }
  out[threadIdx.x] = 1;
}

// ---- warps -----------------------------------------------------------------------------------------------

__global__ void masks(int* out, int which) {
  auto const lane = threadIdx.x % 32;
  int value = static_cast<int>(lane);
  switch (which) {
  case 0: // the caller is not in it
    value = __shfl_xor_sync(0x0000ffffu, value, 1);
    break;
  case 1: // lanes of it have ended
    if (lane >= 20) return;
    value = __shfl_down_sync(~0u, value, 1);
    break;
  case 2: // lanes of it end later
    if (lane < 20) value = __shfl_down_sync(~0u, value, 1);
    break;
  case 3: // lanes of it are at another operation
    if (lane < 16)
      value = __shfl_down_sync(~0u, value, 1);
    else
      value = __shfl_xor_sync(~0u, value, 1);
    break;
  case 4: // lanes of it have another mask
    value = __shfl_down_sync(lane < 16 ? ~0u : 0xffff0000u, value, 1);
    break;
  case 5: // the lane that is read is not in it
    if (lane < 16) value = __shfl_sync(0x0000ffffu, value, 20);
    break;
  default:
    value = __shfl_down_sync(~0u, value, 1);
  }
  out[threadIdx.x] = value;
}

// ---- memory ----------------------------------------------------------------------------------------------

__global__ void store(float* out, int i) {
  out[i] = 1.0f;
}
__global__ void load(float* out, float const* in, int i) {
  out[0] = in[i];
}
__global__ void leave_the_last_out(float* out, int n) {
  for (auto i = static_cast<int>(threadIdx.x); i < n - 1; i += static_cast<int>(blockDim.x)) out[i] = 1.0f;
}
__global__ void four_at_once(float* out, float const* in, int first) {
  tessera::exec::store16(out, tessera::exec::load16(in + first));
}
__global__ void between_two(float* out, char const* in) {
  *out = *reinterpret_cast<float const*>(in + 2);
}
__global__ void beyond_the_array(float* out, int i) {
  __shared__ float values[8], others[8];
  values[threadIdx.x] = 0.0f;
  others[threadIdx.x] = 0.0f;
  __syncthreads();
  if (threadIdx.x == 0) *out = values[i] + others[0];
}
__global__ void dynamic(float* out, unsigned i, bool write) {
  auto* const values = static_cast<float*>(cuda_emulation::dynamic_shared_memory());
  if (write) values[i] = 2.0f;
  *out = values[i];
}
__global__ void blocks_write_the_same(int* out) {
  if (threadIdx.x == 0) *out = static_cast<int>(blockIdx.x);
}
__global__ void read_what_another_block_writes(float* values) {
  auto const i = blockIdx.x * blockDim.x + threadIdx.x;
  values[i] = i == 0 ? 0.0f : values[i - 1];
}
__global__ void through_global_memory(float* values, bool barrier) {
  values[threadIdx.x] = 1.0f;
  if (barrier) __syncthreads();
  values[64 + threadIdx.x] = values[63 - threadIdx.x];
}
__global__ void give_up(int* out) {
  if (*out == 1) __trap();
  *out = 2;
}

} // namespace

TEST_CASE("a missing barrier between the steps of a sum is a race") {
  array<float> in(counting(128)), out(1);
  finds_nothing([&] { CHECK(launch({1, 128}, tree, out.data(), in.data(), true) == cudaSuccess); });
  finds(
      [&] {
        CHECK(launch({1, 128}, tree, out.data(), in.data(), false) == cudaSuccess);
      },
      "race", "sums (512 bytes)", "no barrier in between", "tree", "block (0, 0, 0)", "planted_faults.cu:");
}
TEST_CASE("a missing barrier before shared memory is used again is a race") {
  array<float> in(counting(64)), out(64);
  finds_nothing([&] {
    CHECK(launch({1, 64}, overwritten_too_early, out.data(), in.data(), true) == cudaSuccess);
  });
  finds(
      [&] {
        CHECK(launch({1, 64}, overwritten_too_early, out.data(), in.data(), false) == cudaSuccess);
      },
      "race", "values (256 bytes)");
}
TEST_CASE("CUB's storage used again without a barrier is a race") {
  array<float> out(1);
  finds_nothing([&] { CHECK(launch({1, 64}, storage_used_again, out.data(), true) == cudaSuccess); });
  CHECK(out.values()[0] == 192);
  finds(
      [&] {
        CHECK(launch({1, 64}, storage_used_again, out.data(), false) == cudaSuccess);
      },
      "race", "storage");
}
TEST_CASE("a missing barrier of a warp is a race, and neither half a barrier nor a shuffle replaces it") {
  array<int> out(32);
  finds_nothing([&] {
    CHECK(launch({1, 32}, neighbours_of_a_warp, out.data(), true) == cudaSuccess);
    CHECK(launch({1, 32}, half_a_barrier, out.data(), ~0u) == cudaSuccess);
  });
  finds([&] { CHECK(launch({1, 32}, neighbours_of_a_warp, out.data(), false) == cudaSuccess); }, "race");
  finds([&] { CHECK(launch({1, 32}, half_a_barrier, out.data(), 0u) == cudaSuccess); }, "race");
  finds([&] { CHECK(launch({1, 32}, shuffled_instead, out.data()) == cudaSuccess); }, "race");
}
TEST_CASE("an atomic update and a plain access without a barrier are a race") {
  array<int> out(1);
  finds_nothing([&] { CHECK(launch({1, 64}, atomic_and_plain, out.data(), true) == cudaSuccess); });
  finds([&] { CHECK(launch({1, 64}, atomic_and_plain, out.data(), false) == cudaSuccess); }, "race");
}
TEST_CASE("a barrier that some threads never reach is an error and does not hang") {
  array<int> out(64);
  finds_nothing([&] { CHECK(launch({1, 64}, some_do_not_come, out.data(), 9) == cudaSuccess); });
  finds(
      [&] {
        CHECK(launch({1, 64}, some_do_not_come, out.data(), 0) == cudaSuccess);
      },
      "divergent barrier", "has ended");
  finds(
      [&] {
        CHECK(launch({1, 64}, some_do_not_come, out.data(), 1) == cudaSuccess);
      },
      "divergent barrier", "and", "planted_faults.cu:");
  finds([&] { CHECK(launch({1, 64}, some_do_not_come, out.data(), 2) == cudaSuccess); }, "hang", "waits");
}

TEST_CASE("wrong masks of warp operations are errors that say what is wrong") {
  array<int> out(32);
  auto const run = [&](int which) {
    return [&, which] { CHECK(launch({1, 32}, masks, out.data(), which) == cudaSuccess); };
  };
  finds_nothing(run(9));
  finds(run(0), "wrong warp mask", "does not name the caller's lane 16");
  finds(run(1), "wrong warp mask", "ended");
  finds(run(2), "wrong warp mask", "has ended");
  finds(run(3), "wrong warp mask", "at another operation");
  finds(run(4), "wrong warp mask", "with a mask that names lane");
  finds(run(5), "wrong warp mask", "reads lane 20");
  finds(
      [&] {
        CHECK(launch({1, 24}, masks, out.data(), 9) == cudaSuccess);
      },
      "wrong warp mask", "0xff000000", "the block has 24 threads");
}

TEST_CASE("a store or load beyond an array is found to the byte") {
  array<float> out(10), in(counting(10));
  finds_nothing([&] { CHECK(launch({}, store, out.data(), 9) == cudaSuccess); });
  finds([&] { CHECK(launch({}, store, out.data(), 10) == cudaSuccess); }, "out of bounds", "writes 4 bytes",
        "0 bytes after the end of piece", "(40 bytes)");
  finds([&] { CHECK(launch({}, load, out.data(), in.data(), 12) == cudaSuccess); }, "out of bounds", "reads",
        "8 bytes after the end");
  finds([&] { CHECK(launch({}, load, out.data(), in.data(), -1) == cudaSuccess); }, "out of bounds");
  finds([&] { CHECK(launch({}, store, static_cast<float*>(nullptr), 0) == cudaSuccess); }, "out of bounds",
        "null");
}
TEST_CASE("the kernel stops at a fault, and the device says so until the fault is taken") {
  array<float> out(10);
  auto const faults = faults_of([&] {
    CHECK(launch({}, store, out.data(), 10) == cudaSuccess);
    CHECK(cudaDeviceSynchronize() == cudaErrorIllegalAddress);
    CHECK(launch({}, store, out.data(), 1) == cudaErrorIllegalAddress);
    float* more = nullptr;
    CHECK(cudaMalloc(&more, 4) == cudaErrorIllegalAddress);
  });
  CHECK(faults.size() == 1);
  CHECK(launch({}, store, out.data(), 1) == cudaSuccess);
  CHECK(cudaDeviceSynchronize() == cudaSuccess);
}
TEST_CASE("an output that a kernel leaves out is found when it is read") {
  array<float> out(100), first(1);
  finds(
      [&] {
        CHECK(launch({1, 32}, leave_the_last_out, out.data(), 100) == cudaSuccess);
        CHECK(launch({}, load, first.data(), out.data(), 98) == cudaSuccess);
        CHECK(launch({}, load, first.data(), out.data(), 99) == cudaSuccess);
      },
      "read of unwritten memory", "byte 396 of piece");
  finds(
      [&] {
        std::vector<float> values(100);
        CHECK(cudaMemcpy(values.data(), out.data(), 400, cudaMemcpyDeviceToHost) != cudaSuccess);
      },
      "read of unwritten memory", "a copy", "byte 396");
}
TEST_CASE("memory that was zeroed can be declared unwritten again") {
  array<float> out(std::vector<float>(100));
  cuda_emulation::forget(out.data(), 400);
  finds(
      [&] {
        CHECK(launch({1, 32}, leave_the_last_out, out.data(), 100) == cudaSuccess);
        std::vector<float> values(100);
        (void)cudaMemcpy(values.data(), out.data(), 400, cudaMemcpyDeviceToHost);
      },
      "read of unwritten memory", "byte 396");
}
TEST_CASE("memory is not used after it was given back") {
  float* memory = nullptr;
  REQUIRE(cudaMalloc(&memory, 40) == cudaSuccess);
  REQUIRE(cudaFree(memory) == cudaSuccess);
  finds([&] { CHECK(launch({}, store, memory, 3) == cudaSuccess); }, "use after free", "byte 12",
        "which was freed");

  cudaStream_t stream = nullptr;
  REQUIRE(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking) == cudaSuccess);
  REQUIRE(cudaMallocAsync(&memory, 40, stream) == cudaSuccess);
  finds_nothing([&] { CHECK(launch({1, 1, 0, stream}, store, memory, 3) == cudaSuccess); });
  REQUIRE(cudaFreeAsync(memory, stream) == cudaSuccess);
  finds(
      [&] {
        CHECK(launch({1, 1, 0, stream}, store, memory, 3) == cudaSuccess);
        CHECK(cudaStreamSynchronize(stream) == cudaErrorIllegalAddress);
      },
      "use after free");
  CHECK(cudaStreamDestroy(stream) == cudaSuccess);
}
TEST_CASE("an access begins at a multiple of its size, 16 bytes at once at one of 16") {
  array<float> in(counting(16)), out(4);
  finds_nothing([&] { CHECK(launch({}, four_at_once, out.data(), in.data(), 4) == cudaSuccess); });
  finds([&] { CHECK(launch({}, four_at_once, out.data(), in.data(), 3) == cudaSuccess); }, "misaligned",
        "16 bytes");
  finds(
      [&] {
        CHECK(launch({}, between_two, out.data(), reinterpret_cast<char const*>(in.data())) == cudaSuccess);
      },
      "misaligned", "4 bytes");
}
TEST_CASE("an index beyond a shared array is found although other shared memory follows") {
  array<float> out(1);
  finds_nothing([&] { CHECK(launch({1, 8}, beyond_the_array, out.data(), 7) == cudaSuccess); });
  finds(
      [&] {
        CHECK(launch({1, 8}, beyond_the_array, out.data(), 8) == cudaSuccess);
      },
      "out of bounds", "index 8", "float");
}
TEST_CASE("dynamic shared memory ends where the launch says, and holds nothing at first") {
  array<float> out(1);
  finds_nothing([&] { CHECK(launch({1, 1, 64}, dynamic, out.data(), 15u, true) == cudaSuccess); });
  finds(
      [&] {
        CHECK(launch({1, 1, 64}, dynamic, out.data(), 16u, true) == cudaSuccess);
      },
      "out of bounds", "the 64 bytes of shared memory");
  finds(
      [&] {
        CHECK(launch({1, 1, 64}, dynamic, out.data(), 3u, false) == cudaSuccess);
      },
      "unwritten", "byte 12 of dynamic shared memory");
}
TEST_CASE("what a block left in shared memory is not there for the next") {
  array<float> out(1);
  finds(
      [&] {
        CHECK(launch({1, 1, 64}, dynamic, out.data(), 3u, true) == cudaSuccess);
        CHECK(launch({1, 1, 64}, dynamic, out.data(), 3u, false) == cudaSuccess);
      },
      "unwritten");
}
TEST_CASE("blocks that write the same place, or read what others write, are races") {
  array<int> out(1);
  finds(
      [&] {
        CHECK(launch({2, 32}, blocks_write_the_same, out.data()) == cudaSuccess);
      },
      "race", "thread 0 of block (0, 0, 0)", "nothing that orders the two");
  array<float> values(counting(64));
  finds(
      [&] {
        CHECK(launch({2, 32}, read_what_another_block_writes, values.data()) == cudaSuccess);
      },
      "race");
}
TEST_CASE("threads of a block need a barrier in global memory too") {
  array<float> values(counting(128));
  finds_nothing([&] { CHECK(launch({1, 64}, through_global_memory, values.data(), true) == cudaSuccess); });
  finds(
      [&] {
        CHECK(launch({1, 64}, through_global_memory, values.data(), false) == cudaSuccess);
      },
      "race", "no barrier in between");
}

TEST_CASE("memory of the host is none of a kernel's, and the other way round") {
  array<float> out(1);
  std::vector<float> host{1, 2, 3};
  finds([&] { CHECK(launch({}, load, out.data(), host.data(), 1) == cudaSuccess); },
        "host memory in a kernel");
  finds([&] { out.data()[0] = 1; }, "device memory in host code", "writes 4 bytes");
  CHECK(cudaMemset(out.data(), 0, 4) == cudaSuccess);
  CHECK(cudaDeviceSynchronize() == cudaSuccess);
  volatile float sink = 0;
  finds([&] { sink = out.data()[0]; }, "device memory in host code", "reads 4 bytes");
  float* pinned = nullptr;
  REQUIRE(cudaMallocHost(&pinned, 12) == cudaSuccess);
  pinned[1] = 2;
  finds_nothing([&] { CHECK(launch({}, load, out.data(), pinned, 1) == cudaSuccess); });
  CHECK(cudaFreeHost(pinned) == cudaSuccess);
}
TEST_CASE("memory of another device is reached only after peer access was enabled") {
  array<float> out(1);
  REQUIRE(cudaSetDevice(1) == cudaSuccess);
  auto const faults = faults_of([&] { CHECK(launch({}, store, out.data(), 0) == cudaSuccess); });
  REQUIRE(faults.size() == 1);
  CHECK(faults[0].find("memory of device 0 in a kernel on device 1") != std::string::npos);
  CHECK(cudaDeviceEnablePeerAccess(0, 0) == cudaSuccess);
  finds_nothing([&] { CHECK(launch({}, store, out.data(), 0) == cudaSuccess); });
  CHECK(cudaDeviceDisablePeerAccess(0) == cudaSuccess);
  REQUIRE(cudaSetDevice(0) == cudaSuccess);
}
TEST_CASE("a kernel that gives up stops its device") {
  array<int> out(std::vector<int>{1});
  finds([&] { CHECK(launch({}, give_up, out.data()) == cudaSuccess); }, "trap");
}

TEST_CASE("host code that does not wait for a stream is found out") {
  cudaStream_t stream = nullptr;
  REQUIRE(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking) == cudaSuccess);
  array<float> out(std::vector<float>{0});
  float* pinned = nullptr;
  REQUIRE(cudaMallocHost(&pinned, sizeof(float)) == cudaSuccess);
  *pinned = 5;
  auto const copy_out = [&](bool wait) {
    CHECK(launch({1, 1, 0, stream}, store, out.data(), 0) == cudaSuccess);
    CHECK(cudaMemcpyAsync(pinned, out.data(), sizeof(float), cudaMemcpyDeviceToHost, stream) == cudaSuccess);
    if (wait) CHECK(cudaStreamSynchronize(stream) == cudaSuccess);
    return *pinned;
  };
  float seen = 0;
  finds([&] { seen = copy_out(false); }, "missing synchronisation", "yet to write");
  CHECK(seen == 5);
  finds_nothing([&] { seen = copy_out(true); });
  CHECK(seen == 1);
  finds(
      [&] {
        CHECK(cudaMemcpyAsync(out.data(), pinned, sizeof(float), cudaMemcpyHostToDevice, stream) ==
              cudaSuccess);
        *pinned = 6; // too early
      },
      "missing synchronisation", "yet to read");
  CHECK(cudaStreamSynchronize(stream) == cudaSuccess);
  CHECK(cudaFreeHost(pinned) == cudaSuccess);
  CHECK(cudaStreamDestroy(stream) == cudaSuccess);
}
TEST_CASE("a stream that does not wait for another reads what is not there yet") {
  cudaStream_t producer = nullptr, consumer = nullptr;
  cudaEvent_t event = nullptr;
  REQUIRE(cudaStreamCreateWithFlags(&producer, cudaStreamNonBlocking) == cudaSuccess);
  REQUIRE(cudaStreamCreateWithFlags(&consumer, cudaStreamNonBlocking) == cudaSuccess);
  REQUIRE(cudaEventCreateWithFlags(&event, cudaEventDisableTiming) == cudaSuccess);
  for (bool wait : {false, true}) {
    array<float> between(1), out(1);
    auto const run = [&] {
      CHECK(launch({1, 1, 0, producer}, store, between.data(), 0) == cudaSuccess);
      CHECK(cudaEventRecord(event, producer) == cudaSuccess);
      if (wait) CHECK(cudaStreamWaitEvent(consumer, event) == cudaSuccess);
      CHECK(launch({1, 1, 0, consumer}, load, out.data(), between.data(), 0) == cudaSuccess);
      (void)cudaStreamSynchronize(consumer);
    };
    if (wait) {
      finds_nothing(run);
      CHECK(out.values()[0] == 1);
    } else {
      finds(run, "read of unwritten memory");
    }
  }
  CHECK(cudaEventDestroy(event) == cudaSuccess);
  CHECK(cudaStreamDestroy(producer) == cudaSuccess);
  CHECK(cudaStreamDestroy(consumer) == cudaSuccess);
}

TEST_CASE("an error that nobody looks at is remembered, with the call's name") {
  CHECK(cuda_emulation::take_unchecked_errors().empty());
  float* memory = nullptr;
  cuda_emulation::fail_call(0, cudaErrorMemoryAllocation);
  (void)cudaMalloc(&memory, 4); // dropped
  CHECK(memory == nullptr);
  CHECK(cuda_emulation::take_unchecked_errors() == std::vector<std::string>{"cudaMalloc"});

  cuda_emulation::fail_call(1, cudaErrorMemoryAllocation);
  CHECK(cudaMalloc(&memory, 4) == cudaSuccess); // the call before
  auto const status = cudaFree(memory);
  CHECK(status == cudaErrorMemoryAllocation);
  CHECK(cudaGetErrorName(status) == std::string("cudaErrorMemoryAllocation")); // looked at
  CHECK(cuda_emulation::take_unchecked_errors().empty());
  CHECK(cudaGetLastError() == cudaErrorMemoryAllocation);
  CHECK(cudaGetLastError() == cudaSuccess);
  CHECK(cudaFree(memory) == cudaSuccess);
}
TEST_CASE("launches that no device accepts are refused at once") {
  array<float> out(1);
  auto const refused = [&](shape s) {
    auto const error = launch(s, store, out.data(), 0);
    (void)cudaGetLastError();
    return error;
  };
  CHECK(refused({1, 1025}) == cudaErrorInvalidConfiguration);
  CHECK(refused({1, dim3(1, 1, 65)}) == cudaErrorInvalidConfiguration);
  CHECK(refused({dim3(1, 65536), 1}) == cudaErrorInvalidConfiguration);
  CHECK(refused({0, 1}) == cudaErrorInvalidConfiguration);
  CHECK(refused({1, 0}) == cudaErrorInvalidConfiguration);
  CHECK(refused({1, 1, (48u << 10) + 1}) == cudaErrorInvalidValue);
  CHECK(cudaFuncSetAttribute(store, cudaFuncAttributeMaxDynamicSharedMemorySize, 228 << 10) ==
        cudaErrorInvalidValue);
  (void)cudaGetLastError();
  CHECK(cudaFuncSetAttribute(store, cudaFuncAttributeMaxDynamicSharedMemorySize, 100 << 10) == cudaSuccess);
  CHECK(refused({1, 1, 100u << 10}) == cudaSuccess);
  CHECK(cudaDeviceSynchronize() == cudaSuccess);
  CHECK(cuda_emulation::take_unchecked_errors().empty());
}

TEST_CASE("a program that leaves a fault or an unchecked error behind fails, whatever its tests say") {
  // Of a copy of this process that ends with status 0 after `body`.
  auto const status_after = [](auto body) {
    std::fflush(nullptr);
    auto const child = fork();
    REQUIRE(child >= 0);
    if (child == 0) {
      std::freopen("/dev/null", "w", stderr);
      body();
      std::exit(0);
    }
    int status = 0;
    REQUIRE(waitpid(child, &status, 0) == child);
    return WIFEXITED(status) ? WEXITSTATUS(status) : -1;
  };
  array<float> out(10);
  CHECK(status_after([&] {
          (void)launch({}, store, out.data(), 3);
          (void)cudaDeviceSynchronize();
        }) == 0);
  CHECK(status_after([&] {
          (void)launch({}, store, out.data(), 10);
          (void)cudaDeviceSynchronize();
        }) == 86);
  CHECK(status_after([&] { (void)cudaSetDevice(7); }) == 86);
  CHECK(status_after([&] { CHECK(cudaGetErrorName(cudaSetDevice(7)) != nullptr); }) == 0);
}
