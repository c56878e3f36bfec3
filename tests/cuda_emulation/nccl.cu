// The emulated NCCL: it moves what it is told to, and says what the real one would hang or crash on.
#include <doctest/doctest.h>

#include <string>
#include <thread>
#include <vector>

#include <cuda_emulation/control.hpp>
#include <cuda_emulation/nccl.hpp>
#include <cuda_runtime.h>

namespace {

/// What one rank has: its device, a stream, and room for some floats.
struct rank_here {
  int rank = 0;
  ncclComm_t comm = nullptr;
  cudaStream_t stream = nullptr;
  float* memory = nullptr;

  void fill(std::vector<float> const& values) {
    REQUIRE(cudaMemcpyAsync(memory, values.data(), values.size() * 4, cudaMemcpyHostToDevice, stream) ==
            cudaSuccess);
  }
  std::vector<float> fetch(std::size_t n) {
    std::vector<float> values(n);
    REQUIRE(cudaStreamSynchronize(stream) == cudaSuccess);
    REQUIRE(cudaMemcpy(values.data(), memory, n * 4, cudaMemcpyDeviceToHost) == cudaSuccess);
    return values;
  }
  std::string error() {
    ncclResult_t state = ncclSuccess;
    REQUIRE(ncclCommGetAsyncError(comm, &state) == ncclSuccess);
    return state == ncclSuccess ? "" : std::string(ncclGetErrorString(state)) + ": " + ncclGetLastError(comm);
  }
};

template <class Body>
void on_two_ranks(Body body) {
  cuda_emulation::set_device_count(2);
  ncclUniqueId id;
  REQUIRE(ncclGetUniqueId(&id) == ncclSuccess);
  auto const run = [&](int rank) {
    rank_here mine;
    mine.rank = rank;
    REQUIRE(cudaSetDevice(rank) == cudaSuccess);
    REQUIRE(cudaStreamCreateWithFlags(&mine.stream, cudaStreamNonBlocking) == cudaSuccess);
    REQUIRE(cudaMalloc(&mine.memory, 64 * sizeof(float)) == cudaSuccess);
    REQUIRE(ncclCommInitRank(&mine.comm, 2, id, rank) == ncclSuccess);
    body(mine);
    (void)ncclCommAbort(mine.comm);
    (void)cudaStreamDestroy(mine.stream);
    (void)cudaFree(mine.memory); // fails after a fault
  };
  std::thread other(run, 1);
  run(0);
  other.join();
}

} // namespace

TEST_CASE("collectives and messages move what they are told to, once both ranks have come") {
  on_two_ranks([](rank_here& mine) {
    auto const r = static_cast<float>(mine.rank);
    mine.fill({1 + r, 2 + r, 3 + r, 4 + r});
    REQUIRE(ncclAllReduce(mine.memory, mine.memory, 4, ncclFloat32, ncclSum, mine.comm, mine.stream) ==
            ncclSuccess);
    CHECK(mine.fetch(4) == std::vector<float>{3, 5, 7, 9});
    mine.fill({10 * r, 10 * r});
    REQUIRE(ncclAllGather(mine.memory + mine.rank, mine.memory, 1, ncclFloat32, mine.comm, mine.stream) ==
            ncclSuccess);
    CHECK(mine.fetch(2) == std::vector<float>{0, 10});
    mine.fill({5 + r, 0});
    REQUIRE(ncclGroupStart() == ncclSuccess);
    REQUIRE(ncclRecv(mine.memory + 1, 1, ncclFloat32, 1 - mine.rank, mine.comm, mine.stream) == ncclSuccess);
    REQUIRE(ncclSend(mine.memory, 1, ncclFloat32, 1 - mine.rank, mine.comm, mine.stream) == ncclSuccess);
    REQUIRE(ncclGroupEnd() == ncclSuccess);
    CHECK(mine.fetch(2) == std::vector<float>{5 + r, 6 - r});
    CHECK(mine.error().empty());
  });
  CHECK(cuda_emulation::faults().empty());
}

TEST_CASE("ranks that call different things both get an error that names both calls") {
  auto const differs = [](auto call, char const* first, char const* second) {
    on_two_ranks([&](rank_here& mine) {
      mine.fill(std::vector<float>(8, 1));
      REQUIRE(call(mine) == ncclSuccess);
      REQUIRE(cudaStreamSynchronize(mine.stream) == cudaSuccess);
      auto const text = mine.error();
      CAPTURE(text);
      CHECK(text.find("invalid usage") == 0);
      CHECK(text.find(std::string("rank 0 calls ") + first) != std::string::npos);
      CHECK(text.find(std::string("rank 1 ") + second) != std::string::npos);
    });
  };
  differs(
      [](rank_here& m) {
        return ncclAllReduce(m.memory, m.memory, m.rank == 0 ? 4 : 5, ncclFloat32, ncclSum, m.comm, m.stream);
      },
      "ncclAllReduce of 4", "ncclAllReduce of 5");
  differs(
      [](rank_here& m) {
        return ncclAllReduce(m.memory, m.memory, 4, m.rank == 0 ? ncclFloat32 : ncclInt32, ncclSum, m.comm,
                             m.stream);
      },
      "ncclAllReduce of 4 elements of type 7", "ncclAllReduce of 4 elements of type 2");
  differs(
      [](rank_here& m) {
        return m.rank == 0 ? ncclBroadcast(m.memory, m.memory, 4, ncclFloat32, 0, m.comm, m.stream)
                           : ncclAllReduce(m.memory, m.memory, 4, ncclFloat32, ncclSum, m.comm, m.stream);
      },
      "ncclBroadcast", "ncclAllReduce");
}

TEST_CASE("memory that nobody wrote is not sent in silence") {
  cuda_emulation::print_faults(false);
  on_two_ranks([](rank_here& mine) {
    if (mine.rank == 0) mine.fill({1, 2, 3, 4});
    REQUIRE(ncclAllReduce(mine.memory, mine.memory, 4, ncclFloat32, ncclSum, mine.comm, mine.stream) ==
            ncclSuccess);
    (void)cudaStreamSynchronize(mine.stream);
  });
  auto const faults = cuda_emulation::take_faults();
  (void)cuda_emulation::take_unchecked_errors();
  cuda_emulation::print_faults(true);
  REQUIRE(!faults.empty());
  CHECK(faults[0].kind == cuda_emulation::fault_kind::unwritten_read);
  CHECK(faults[0].message.find("ncclAllReduce") != std::string::npos);
}

TEST_CASE("buffers of the host, of another device, or that overlap are refused at once") {
  on_two_ranks([](rank_here& mine) {
    std::vector<float> host(4);
    auto const refused = [&](ncclResult_t result, char const* text) {
      CHECK(result == ncclInvalidArgument);
      CHECK(std::string(ncclGetErrorString(result)) == "invalid argument");
      CHECK(std::string(ncclGetLastError(mine.comm)) == text);
    };
    refused(ncclAllReduce(host.data(), mine.memory, 4, ncclFloat32, ncclSum, mine.comm, mine.stream),
            "a buffer is not in the communicator's device memory");
    refused(ncclAllReduce(mine.memory, mine.memory + 1, 4, ncclFloat32, ncclSum, mine.comm, mine.stream),
            "the buffers overlap");
    refused(ncclAllReduce(nullptr, mine.memory, 4, ncclFloat32, ncclSum, mine.comm, mine.stream),
            "a buffer is null");
    refused(ncclSend(mine.memory, 4, ncclFloat32, 2, mine.comm, mine.stream), "the root or peer is no rank");
  });
}
