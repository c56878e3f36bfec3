// requires: json xxhash
//
// A run moves between host and CUDA by its checkpoint, and a trained model decodes the same on both.
#include "run.hpp"
#include <support/temporary_folder.hpp>
#include <tessera/train/checkpoint.hpp>
#include <tessera/train/generate.hpp>

using namespace tessera;
using namespace training;

TEST_CASE("A run goes on from the other space's checkpoint") {
  test::temporary_folder folder;
  auto const expected = on_host<bf16>(gpt2());
  auto const save = [&](auto& mine, char const* name) {
    return train::save_checkpoint(mine.comm, mine.ex, folder / name, {.step = mine.step}, mine.model.store(),
                                  mine.replicas);
  };
  auto const go_on = [&](auto& mine, std::string const& path) {
    train::load_checkpoint(mine.comm, mine.ex, path, mine.model.store(), mine.replicas);
    mine.step = train::read_state(mine.comm, path).step;
    mine.train(steps);
    CHECK(distance(mine.seen.losses, std::span(expected.losses).last(2)) < 1e-2);
    CHECK(distance(mine.seen.weights, expected.weights) < 1e-2);
  };
  comm::self alone;
  exec::host host({.threads = 1});

  SUBCASE("CUDA's on the host") {
    std::string path;
    std::vector<float> saved;
    on_cuda_ranks(2, [&](comm::nccl& comm, exec::cuda& ex) {
      cuda_run<bf16> mine(comm, ex, gpt2());
      mine.train(3);
      auto const written = save(mine, "cuda");
      if (comm.rank() != 0) return;
      path = written;
      saved = mine.weights();
    });
    host_run<bf16> mine(alone, host, gpt2());
    train::load_weights(host, path, mine.model.store());
    CHECK(mine.weights() == saved);
    go_on(mine, path);
  }
  SUBCASE("the host's on CUDA, and the same bytes again") {
    host_run<bf16> first(alone, host, gpt2());
    first.train(3);
    auto const path = save(first, "host");
    on_cuda_ranks(2, [&](comm::nccl& comm, exec::cuda& ex) {
      cuda_run<bf16> mine(comm, ex, gpt2());
      train::load_checkpoint(comm, ex, path, mine.model.store(), mine.replicas);
      mine.step = 3;
      auto const copied = save(mine, "copied");
      if (comm.rank() == 0)
        for (auto const* name : {"/model.safetensors", "/optimizer.safetensors"})
          CHECK(io::mapped_file(path + name).text() == io::mapped_file(copied + name).text());
      go_on(mine, path);
    });
  }
}

TEST_CASE("A decoder continues a prompt as the host's does") {
  auto const config = gpt2();
  std::vector<std::int32_t> const prompt{7, 3, 99, 0, 41};
  auto const continued = [&](auto& mine) {
    nn::decoder decoder(mine.model.units(), mine.model.store(), config, {.chunk = 3});
    return train::generate(mine.ex, decoder, prompt, 20, {.temperature = 0}, philox(5), [](std::int32_t) {});
  };
  comm::self alone;
  exec::host host({.threads = 1});
  host_run<float> expected(alone, host, config);
  on_cuda_ranks(1, [&](comm::nccl& comm, exec::cuda& ex) {
    cuda_run<float> mine(comm, ex, config);
    CHECK(continued(mine) == continued(expected));
  });
}
