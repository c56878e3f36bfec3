// Five training steps on CUDA leave the host's losses, norms and weights, alone and with ZeRO-1 on two NCCL
// ranks; in fp32.
#include "run.hpp"
#include <tessera/train/machine.hpp>

using namespace tessera;
using namespace training;

TEST_CASE("Five steps of a GPT-2 are the host's, alone and with ZeRO-1 on two ranks, in fp32") {
  check_steps<float>(gpt2(), 1e-5);
}

TEST_CASE("Five steps of a Llama are the host's, alone and with ZeRO-1 on two ranks, in fp32") {
  check_steps<float>(llama(), 1e-5);
}

TEST_CASE("A token outside the vocabulary is found when the loss is read, and the model goes on") {
  on_cuda_ranks(1, [](comm::nccl& comm, exec::cuda& ex) {
    cuda_run<float> mine(comm, ex, llama());
    auto const good = mine.batch();
    auto const loss = mine.model.evaluate(ex, good.first, good.second);
    mine.tokens.host()(1, 3) = 101;
    (void)mine.tokens.upload(ex);
    CHECK_THROWS_AS(mine.model.evaluate(ex, good.first, good.second), size_error);
    auto const again = mine.batch();
    CHECK(mine.model.evaluate(ex, again.first, again.second).sum == loss.sum);
  });
}

TEST_CASE("The matrix peak of a device is a positive rate") {
  on_cuda_ranks(1, [](comm::nccl&, exec::cuda& ex) {
    CHECK(train::matrix_peak<bf16>(ex, {.size = 64, .largest = 64, .tries = 1}) > 0);
  });
}
