// As step.cu, in bf16; and a forward and backward captured in a CUDA graph.
#include "run.hpp"

using namespace tessera;
using namespace training;

TEST_CASE("Five steps of a GPT-2 are the host's, alone and with ZeRO-1 on two ranks, in bf16") {
  check_steps<bf16>(gpt2(), 1e-2);
}

TEST_CASE("Five steps of a Llama are the host's, alone and with ZeRO-1 on two ranks, in bf16") {
  check_steps<bf16>(llama(), 1e-2);
}

TEST_CASE("Forward and backward captured in a CUDA graph leave the bits of those that are not") {
  on_cuda_ranks(1, [](comm::nccl& comm, exec::cuda& ex) {
    cuda_run<bf16> mine(comm, ex, llama());
    auto const [in, out] = mine.batch();
    auto const loss = mine.model.forward_backward(ex, in, out, mine.pass());
    auto const expected = mine.gradients();

    exec::graph graph;
    graph.capture(ex, [&, in = in, out = out] {
      mine.model.start_forward_backward(ex, in, out, mine.pass(), [](std::size_t) {});
    });
    zero(ex, mine.model.store().gradients());
    mine.model.clear_loss(ex);
    graph.launch(ex);
    graph.launch(ex);
    auto const twice = mine.model.read_loss(ex);
    CHECK(twice.sum == 2 * loss.sum);
    CHECK(twice.count == 2 * loss.count);
    CHECK(mine.gradients() == expected);

    // Another batch in the same place.
    ++mine.step;
    (void)mine.batch();
    mine.model.clear_loss(ex);
    graph.launch(ex);
    CHECK(mine.model.read_loss(ex).sum != loss.sum);
    CHECK(mine.gradients() != expected);
  });
}
