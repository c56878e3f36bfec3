// Streams are worked off when somebody waits, events order them, graphs replay what was captured.
#include "fixture.hpp"

#include <atomic>
#include <memory>
#include <thread>

#include <nvtx3/nvToolsExt.h>

#include <cuda_emulation/library.hpp>

using namespace fixture;

namespace {

__global__ void add(float* values, float what, int n) {
  auto const i = static_cast<int>(blockIdx.x * blockDim.x + threadIdx.x);
  if (i < n) values[i] += what;
}
__global__ void multiply(float* values, float by, int n) {
  auto const i = static_cast<int>(blockIdx.x * blockDim.x + threadIdx.x);
  if (i < n) values[i] *= by;
}

struct owned_stream {
  cudaStream_t stream = nullptr;
  owned_stream() { REQUIRE(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking) == cudaSuccess); }
  ~owned_stream() { CHECK(cudaStreamDestroy(stream) == cudaSuccess); }
  operator cudaStream_t() const { return stream; }
};
struct owned_event {
  cudaEvent_t event = nullptr;
  owned_event() { REQUIRE(cudaEventCreate(&event) == cudaSuccess); }
  ~owned_event() { CHECK(cudaEventDestroy(event) == cudaSuccess); }
  operator cudaEvent_t() const { return event; }
};
template <class T>
struct pinned {
  T* data = nullptr;
  explicit pinned(std::size_t count) { REQUIRE(cudaMallocHost(&data, count * sizeof(T)) == cudaSuccess); }
  ~pinned() { CHECK(cudaFreeHost(data) == cudaSuccess); }
};

} // namespace

TEST_CASE("work waits until somebody waits for it, and then keeps its order") {
  owned_stream const stream;
  array<float> values(counting(4));
  finds_nothing([&] {
    int done = 0;
    auto const count = [](void* n) { ++*static_cast<int*>(n); };
    CHECK(launch({1, 4, 0, stream}, add, values.data(), 1.0f, 4) == cudaSuccess);
    CHECK(launch({1, 4, 0, stream}, multiply, values.data(), 2.0f, 4) == cudaSuccess);
    CHECK(cudaLaunchHostFunc(stream, count, &done) == cudaSuccess);
    CHECK(done == 0);
    CHECK(cudaStreamQuery(stream) == cudaErrorNotReady);
    CHECK(cudaStreamSynchronize(stream) == cudaSuccess);
    CHECK(done == 1);
    CHECK(cudaStreamQuery(stream) == cudaSuccess);
  });
  CHECK(values.values() == std::vector<float>{2, 4, 6, 8});
}

TEST_CASE("who asks often enough sees an event pass") {
  owned_stream const stream;
  owned_event const event;
  array<float> values(counting(4));
  CHECK(cudaEventQuery(event) == cudaSuccess); // never recorded
  for (int i = 0; i < 3; ++i) CHECK(launch({1, 4, 0, stream}, add, values.data(), 1.0f, 4) == cudaSuccess);
  CHECK(cudaEventRecord(event, stream) == cudaSuccess);
  int asked = 0;
  while (cudaEventQuery(event) == cudaErrorNotReady) ++asked;
  (void)cudaGetLastError();
  CHECK(asked >= 3);
  CHECK(cudaEventQuery(event) == cudaSuccess);
}

TEST_CASE("an event holds a stream back until another has come so far") {
  owned_stream const first, second;
  owned_event const event;
  array<float> values(counting(4));
  finds_nothing([&] {
    CHECK(launch({1, 4, 0, first}, add, values.data(), 1.0f, 4) == cudaSuccess);
    CHECK(cudaEventRecord(event, first) == cudaSuccess);
    CHECK(launch({1, 4, 0, first}, add, values.data(), 100.0f, 4) == cudaSuccess); // after the event
    CHECK(cudaStreamWaitEvent(second, event, 0) == cudaSuccess);
    CHECK(launch({1, 4, 0, second}, multiply, values.data(), 3.0f, 4) == cudaSuccess);
    CHECK(cudaStreamSynchronize(second) == cudaSuccess);
    // Nobody has waited for the first one's last kernel.
    CHECK(values.values() == std::vector<float>{3, 6, 9, 12});
  });
  CHECK(cudaStreamSynchronize(first) == cudaSuccess);
  CHECK(values.values() == std::vector<float>{103, 106, 109, 112});
}

TEST_CASE("events measure time") {
  owned_stream const stream;
  owned_event const start, end;
  array<float> values(counting(4));
  CHECK(cudaEventRecord(start, stream) == cudaSuccess);
  CHECK(launch({1, 4, 0, stream}, add, values.data(), 1.0f, 4) == cudaSuccess);
  CHECK(cudaEventRecord(end, stream) == cudaSuccess);
  float milliseconds = -1;
  CHECK(cudaEventElapsedTime(&milliseconds, start, end) == cudaErrorNotReady);
  (void)cudaGetLastError();
  CHECK(cudaEventSynchronize(end) == cudaSuccess);
  CHECK(cudaEventElapsedTime(&milliseconds, start, end) == cudaSuccess);
  CHECK(milliseconds > 0);
}

TEST_CASE("the default stream waits for blocking streams and not for the others") {
  cudaStream_t blocking = nullptr;
  REQUIRE(cudaStreamCreate(&blocking) == cudaSuccess);
  owned_stream const other;
  array<float> a(counting(4)), b(counting(4));
  CHECK(launch({1, 4, 0, blocking}, add, a.data(), 1.0f, 4) == cudaSuccess);
  CHECK(launch({1, 4, 0, other}, add, b.data(), 1.0f, 4) == cudaSuccess);
  CHECK(a.values()[0] == 1);
  CHECK(b.values()[0] == 0);
  CHECK(cudaStreamSynchronize(other) == cudaSuccess);
  CHECK(b.values()[0] == 1);
  CHECK(cudaStreamDestroy(blocking) == cudaSuccess);
}

TEST_CASE("copies keep the order of their stream; from pageable memory the source is free at once") {
  owned_stream const stream;
  array<float> values(4);
  pinned<float> out(4);
  std::vector<float> in{1, 2, 3, 4};
  finds_nothing([&] {
    CHECK(cudaMemcpyAsync(values.data(), in.data(), 16, cudaMemcpyDefault, stream) == cudaSuccess);
    in.assign(4, 9);
    CHECK(launch({1, 4, 0, stream}, add, values.data(), 1.0f, 4) == cudaSuccess);
    CHECK(cudaMemcpyAsync(out.data, values.data(), 16, cudaMemcpyDefault, stream) == cudaSuccess);
    CHECK(cudaMemsetAsync(values.data(), 0, 16, stream) == cudaSuccess);
    CHECK(cudaStreamSynchronize(stream) == cudaSuccess);
    CHECK(out.data[0] == 2);
    CHECK(out.data[3] == 5);
  });
  CHECK(values.values() == std::vector<float>(4));
}

TEST_CASE("rectangles are copied row by row") {
  array<float> values(counting(12));
  std::vector<float> part(6);
  CHECK(cudaMemcpy2D(part.data(), 8, values.data() + 1, 16, 8, 3, cudaMemcpyDeviceToHost) == cudaSuccess);
  CHECK(part == std::vector<float>{1, 2, 5, 6, 9, 10});
}

TEST_CASE("a captured step is run by each launch of the graph, and not before") {
  owned_stream const stream, side;
  owned_event const fork, join;
  array<float> values(counting(4)), others(counting(4));
  cudaGraph_t graph = nullptr;
  cudaGraphExec_t executable = nullptr;
  auto status = cudaStreamCaptureStatusNone;
  finds_nothing([&] {
    CHECK(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal) == cudaSuccess);
    CHECK(cudaStreamIsCapturing(stream, &status) == cudaSuccess);
    CHECK(status == cudaStreamCaptureStatusActive);
    CHECK(launch({1, 4, 0, stream}, add, values.data(), 1.0f, 4) == cudaSuccess);
    CHECK(cudaEventRecord(fork, stream) == cudaSuccess);
    CHECK(cudaStreamWaitEvent(side, fork) == cudaSuccess);
    CHECK(launch({1, 4, 0, side}, add, others.data(), 5.0f, 4) == cudaSuccess);
    CHECK(cudaEventRecord(join, side) == cudaSuccess);
    CHECK(cudaStreamWaitEvent(stream, join) == cudaSuccess);
    CHECK(launch({1, 4, 0, stream}, multiply, values.data(), 2.0f, 4) == cudaSuccess);
    CHECK(cudaStreamEndCapture(stream, &graph) == cudaSuccess);
    std::size_t nodes = 0;
    CHECK(cudaGraphGetNodes(graph, nullptr, &nodes) == cudaSuccess);
    CHECK(nodes == 3);
    CHECK(cudaGraphInstantiate(&executable, graph, 0) == cudaSuccess);
    CHECK(cudaGraphDestroy(graph) == cudaSuccess);
    CHECK(cudaStreamSynchronize(side) == cudaSuccess);
  });
  CHECK(values.values()[0] == 0);
  for (int i = 0; i < 2; ++i) CHECK(cudaGraphLaunch(executable, stream) == cudaSuccess);
  CHECK(values.values()[0] == 0);
  CHECK(cudaStreamSynchronize(stream) == cudaSuccess);
  CHECK(values.values() == std::vector<float>{6, 10, 14, 18});
  CHECK(others.values()[0] == 10);
  CHECK(cudaGraphExecDestroy(executable) == cudaSuccess);
}

TEST_CASE("waiting, allocating, and forgetting to join a stream break a capture") {
  owned_stream const stream, side;
  owned_event const event;
  array<float> values(counting(4));
  auto const captured = [&](auto body) {
    CHECK(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal) == cudaSuccess);
    body();
    cudaGraph_t graph = nullptr;
    auto const error = cudaStreamEndCapture(stream, &graph);
    if (graph != nullptr) CHECK(cudaGraphDestroy(graph) == cudaSuccess);
    (void)cuda_emulation::take_unchecked_errors();
    return error;
  };
  CHECK(captured([&] { CHECK(cudaStreamSynchronize(stream) == cudaErrorStreamCaptureUnsupported); }) ==
        cudaErrorStreamCaptureInvalidated);
  CHECK(captured([&] { CHECK(cudaDeviceSynchronize() == cudaErrorStreamCaptureUnsupported); }) ==
        cudaErrorStreamCaptureInvalidated);
  CHECK(captured([&] {
          float* memory = nullptr;
          CHECK(cudaMalloc(&memory, 4) == cudaErrorStreamCaptureUnsupported);
        }) == cudaErrorStreamCaptureInvalidated);
  CHECK(captured([&] {
          CHECK(cudaEventRecord(event, stream) == cudaSuccess);
          CHECK(cudaStreamWaitEvent(side, event) == cudaSuccess);
          CHECK(launch({1, 4, 0, side}, add, values.data(), 1.0f, 4) == cudaSuccess);
        }) == cudaErrorStreamCaptureUnjoined);
  CHECK(captured([&] {
          CHECK(launch({1, 4, 0, stream}, add, values.data(), 1.0f, 4) == cudaSuccess);
        }) == cudaSuccess);
  (void)cudaGetLastError();
}

TEST_CASE("threads of the process run kernels side by side") {
  std::vector<std::thread> threads;
  std::atomic<int> right{0};
  for (int t = 0; t < 4; ++t)
    threads.emplace_back([&, t] {
      if (cudaSetDevice(t % 2) != cudaSuccess) return;
      cudaStream_t stream = nullptr;
      float* values = nullptr;
      std::vector<float> out(1000);
      bool good = cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking) == cudaSuccess &&
                  cudaMalloc(&values, 4000) == cudaSuccess &&
                  cudaMemsetAsync(values, 0, 4000, stream) == cudaSuccess;
      for (int i = 0; i < 20; ++i)
        good = good && launch({4, 256, 0, stream}, add, values, static_cast<float>(t), 1000) == cudaSuccess;
      good = good && cudaMemcpyAsync(out.data(), values, 4000, cudaMemcpyDefault, stream) == cudaSuccess &&
             cudaStreamSynchronize(stream) == cudaSuccess;
      for (float value : out) good = good && value == 20.0f * static_cast<float>(t);
      good = good && cudaFree(values) == cudaSuccess && cudaStreamDestroy(stream) == cudaSuccess;
      right += good;
    });
  for (auto& thread : threads) thread.join();
  CHECK(right == 4);
  CHECK(cuda_emulation::faults().empty());
}

TEST_CASE("work of another library may wait for work in another stream") {
  owned_stream const first, second;
  auto const flag = std::make_shared<bool>(false);
  CHECK(cuda_emulation::enqueue(first, "wait", [flag] { return *flag; }) == cudaSuccess);
  CHECK(cuda_emulation::enqueue(second, "set", [flag] { return *flag = true; }) == cudaSuccess);
  CHECK(cudaStreamSynchronize(first) == cudaSuccess);
  CHECK(*flag);
}

TEST_CASE("other libraries are held to the same memory") {
  array<float> values(4);
  CHECK(cuda_emulation::device_of_memory(values.data()) == 0);
  float host = 0;
  CHECK(cuda_emulation::device_of_memory(&host) == -1);
  finds([&] { CHECK_FALSE(cuda_emulation::read_memory(values.data(), 16, "a product")); }, "unwritten",
        "a product");
  finds_nothing([&] {
    CHECK(cuda_emulation::write_memory(values.data(), 16, "a product"));
    CHECK(cuda_emulation::read_memory(values.data(), 16, "a product"));
  });
  finds([&] { CHECK_FALSE(cuda_emulation::write_memory(values.data(), 20, "a product")); }, "out of bounds");
}

TEST_CASE("devices, memory and pointers describe themselves") {
  int count = 0, value = 0;
  CHECK(cudaGetDeviceCount(&count) == cudaSuccess);
  CHECK(count == 2);
  cuda_emulation::set_device_count(0);
  CHECK(cudaGetDeviceCount(&count) == cudaErrorNoDevice);
  cuda_emulation::set_device_count(2);
  cudaDeviceProp properties;
  CHECK(cudaGetDeviceProperties(&properties, 1) == cudaSuccess);
  CHECK(properties.warpSize == 32);
  CHECK(cudaDeviceGetAttribute(&value, cudaDevAttrComputeCapabilityMajor, 0) == cudaSuccess);
  CHECK(value == 9);
  auto const before = cuda_emulation::bytes_in_use();
  {
    array<float> values(10);
    CHECK(cuda_emulation::bytes_in_use() == before + 40);
    cudaPointerAttributes attributes;
    CHECK(cudaPointerGetAttributes(&attributes, values.data() + 3) == cudaSuccess);
    CHECK(attributes.type == cudaMemoryTypeDevice);
    CHECK(attributes.device == 0);
  }
  CHECK(cuda_emulation::bytes_in_use() == before);
  int blocks = 0;
  CHECK(cudaOccupancyMaxActiveBlocksPerMultiprocessor(&blocks, add, 256, 0) == cudaSuccess);
  CHECK(blocks == 8);
  CHECK(nvtxRangePushA("here") == 0);
  CHECK(cuda_emulation::open_ranges() == 1);
  CHECK(nvtxRangePop() == 0);
}
