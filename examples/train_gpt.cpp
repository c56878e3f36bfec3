// requires: mpi openmp json xxhash sentencepiece cli11
//
// Trains a transformer on a text. What happens, from the text to the updated weight:
//
//   tokens     = tokenizer(text), cut into sequences; the last share of them is kept for validation
//   every step:
//     each data rank takes its share of the batch's sequences, in an order that depends on the seed alone
//     for each micro-batch:  loss += forward(tokens);  gradients += backward()      (sums, not means),
//       through the stages of a pipeline, with matrices and sequences shared, as the layout says
//     gradients = sum over ranks, while backward still runs
//     weights   = AdamW(gradients / number of tokens, clipped by their global norm)
//     now and then: validation loss, checkpoint
//   at the end: full validation, loss.svg, summary.json, a sample of text
//
// The loop itself is train/trainer.hpp; this program chooses what it runs on:
//
//   ./train_gpt --data text.txt                      one rank, all cores
//   ./train_gpt --data text.txt --ranks 2            two ranks, which are threads of this process
//   mpiexec -n 2 ./train_gpt --data text.txt         two ranks, which are MPI processes
//   ./train_gpt --data text.txt --device cuda        on a GPU; with two ranks of either kind on two GPUs
//   ./train_gpt --data text.txt --ranks 8 --layout "data 2 x tensor 2 x pipeline 2, zero 3"
//
// All of them train the same model, to rounding; the second and third to the last bit. With TESSERA_WITH_NCCL
// this same file is compiled by nvcc, which cannot read oneDNN's header: there the host multiplies by
// Tessera's own loops. Without it there is no --device cuda, and no other difference.
#include <algorithm>
#include <cstdio>

#include <unistd.h>

#include <tessera/comm/mpi.hpp>
#include <tessera/comm/threads.hpp>
#include <tessera/exec/host.hpp>
#include <tessera/train/command_line.hpp>
#include <tessera/train/node_share.hpp>
#include <tessera/train/report.hpp>
#if defined(TESSERA_WITH_NCCL)
#include <tessera/comm/cuda/nccl.cuh>
#include <tessera/comm/nccl.hpp>
#include <tessera/cuda.cuh>
#endif

using namespace tessera;

namespace {

train::command_line_text const help{
    .program = "train_gpt",
    .purpose = "Trains a transformer on a text, on any number of ranks.",
    .examples =
        "\nExamples:\n"
        "  A first model, a minute or two:\n"
        "    train_gpt --data book.txt --run first\n"
        "  Words instead of letters, on two MPI ranks, with settings from a file:\n"
        "    mpiexec -n 2 train_gpt --config settings.json --data book.txt --tokenizer sentencepiece\n"
        "  A Llama with grouped key/value heads, in fp32:\n"
        "    train_gpt --data book.txt --family llama --heads 8 --key-value-heads 2 --storage fp32\n"
        "  Eight ranks that share samples, matrices and layers (docs/layouts.md):\n"
        "    train_gpt --data book.txt --ranks 8 --layout 'data 2 x tensor 2 x pipeline 2, zero 3, 1f1b'\n"
        "  On a GPU:\n"
        "    train_gpt --data book.txt --device cuda --layers 12 --width 768 --heads 12\n"
        "  Go on from the latest checkpoint with another learning rate, on purpose:\n"
        "    train_gpt --data book.txt --run first --learning-rate 5e-4 --allow-difference learning_rate\n"};

template <storage_scalar T, comm::communicator Comm, exec::space Ex>
void train_as(Comm& comm, Ex& ex, train::settings const& s, char const* kind) {
  train::trainer<Comm, Ex, T> trainer(comm, ex, s, {.out = stderr, .terminal = isatty(2) == 1});
  trainer.run();
  train::report(trainer, stdout, kind);
}

template <comm::communicator Comm, exec::space Ex>
void train_in(Comm& comm, Ex& ex, train::settings const& s, char const* kind) {
  if (s.storage == "bf16")
    train_as<bf16>(comm, ex, s, kind);
  else
    train_as<float>(comm, ex, s, kind);
}

template <comm::communicator Comm>
void train_on(Comm& comm, train::settings const& s, char const* kind) {
  auto const share = train::node_share_of(comm);
  if (s.device == "host") {
    exec::host ex({.threads = s.threads > 0 ? narrow<int>(s.threads) : share.cores});
    train_in(comm, ex, s, kind);
  } else {
#if defined(TESSERA_WITH_NCCL)
    exec::cuda ex({.device = share.rank % std::max(1, exec::cuda_devices())}); // says so if there is none
    comm::nccl linked(comm, ex, {.stall_limit = comm.size() > 1 ? s.stall_limit : 0});
    train_in(linked, ex, s, "nccl");
#else
    throw config_error(
        "E-train-007", site::here(), "device is ", s.device, ", and this program was built ",
        "without CUDA and NCCL; build it with -DTESSERA_WITH_CUDA=ON -DTESSERA_WITH_NCCL=ON, or ",
        "choose --device host");
#endif
  }
}

int run(comm::mpi& world, int argc, char** argv) {
  auto const s = train::command_line(argc, argv, help, world.rank() == 0 ? stdout : nullptr);
  if (!s) return 0;
  if (world.size() > 1) {
    if (s->ranks != 1)
      throw config_error("E-train-007", site::here(), "ranks is ", s->ranks, ", but mpiexec started ",
                         world.size(), " processes, which are the ranks: leave it at 1");
    comm::mpi ranks(MPI_COMM_WORLD, {.stall_limit = s->stall_limit});
    train_on(ranks, *s, "mpi");
  } else {
    comm::run_threads(narrow<int>(s->ranks), [&](comm::threads& ranks) { train_on(ranks, *s, "threads"); },
                      {.stall_limit = s->stall_limit});
  }
  return 0;
}

} // namespace

int main(int argc, char** argv) {
  auto const body = [&](comm::mpi& world) {
    if (world.size() > 1) return run(world, argc, argv); // run_mpi prints an error and ends all ranks
    try {
      return run(world, argc, argv);
    } catch (std::exception const& fault) {
      std::fprintf(stderr, "train_gpt: %s\n", fault.what());
      return 1;
    }
  };
  return comm::run_mpi(argc, argv, body);
}
