// requires: json xxhash sentencepiece
//
// The trainer and its report on CUDA, alone and on two NCCL ranks: the host's losses, step by step; runs that
// change from one device to the other and back; the same bytes in the checkpoints of both.
#include "run.hpp"
#include <support/temporary_folder.hpp>
#include <support/thrown.hpp>
#include <tessera/train/report.hpp>

using namespace tessera;

namespace {

train::settings small(test::temporary_folder const& folder, std::string const& run) {
  train::settings s;
  s.data = folder / "text.txt";
  s.run = folder / run;
  s.steps = 6;
  s.warm_up_steps = 2;
  s.width = 16;
  s.heads = 2;
  s.layers = 1;
  s.sequence_length = 12;
  s.batch = 5;
  s.micro_batch = 2;
  s.dropout = 0.2;
  s.epsilon = 1e-5; // see run.hpp
  s.storage = "fp32";
  s.checkpoint_every = 2;
  s.validate_every = 3;
  s.validation_samples = 7;
  s.measure_peak = false;
  s.sample_tokens = 5;
  return s;
}

void put_text(test::temporary_folder const& folder) {
  std::string text;
  for (int i = 0; i < 100; ++i) text += "line " + std::to_string(i * i) + "\n";
  test::put(folder / "text.txt", text);
}

struct account {
  std::vector<train::metrics_row> rows;
  double validation = 0;
};

template <class Comm, class Ex>
void run_rank(Comm& comm, Ex& ex, train::settings const& s, account& seen) {
  train::trainer<Comm, Ex, float> trainer(comm, ex, s);
  trainer.run();
  auto* const nowhere = std::tmpfile();
  train::report(trainer, nowhere, "threads");
  std::fclose(nowhere);
  if (comm.rank() == 0)
    seen = {train::read_metrics(trainer.metrics_path()), parallel::mean_of(trainer.validation())};
}

account train_on(int ranks, train::settings const& s) {
  account seen;
  comm::run_threads(ranks, [&](comm::threads& all) {
    if (s.device == "host") {
      exec::host ex({.threads = 1});
      run_rank(all, ex, s, seen);
    } else {
      exec::cuda ex({.device = all.rank(), .workspace_bytes = 1 << 16});
      comm::nccl linked(all, ex);
      run_rank(linked, ex, s, seen);
    }
  });
  return seen;
}

void check_same(account const& found, account const& expected) {
  REQUIRE(found.rows.size() == expected.rows.size());
  for (std::size_t i = 0; i < found.rows.size(); ++i) {
    CHECK(found.rows[i].loss == doctest::Approx(expected.rows[i].loss).epsilon(1e-5));
    CHECK(found.rows[i].gradient_norm == doctest::Approx(expected.rows[i].gradient_norm).epsilon(1e-4));
  }
  CHECK(found.validation == doctest::Approx(expected.validation).epsilon(1e-5));
}

} // namespace

TEST_CASE("A run on CUDA has the host's losses, step by step, and says in its summary where it was") {
  test::temporary_folder folder;
  put_text(folder);
  auto const expected = train_on(1, small(folder, "host"));
  REQUIRE(expected.rows.size() == 6);
  CHECK(io::read_json(folder / "host/summary.json")["layout"]["runs_on"].get<std::string>().find(
            "1 thread") == 0);
  for (int ranks : {1, 2}) {
    if (training::ranks_here(ranks) < ranks) continue;
    CAPTURE(ranks);
    auto const name = "cuda" + std::to_string(ranks);
    auto s = small(folder, name);
    s.device = "cuda";
    s.zero_stage = ranks - 1;
    check_same(train_on(ranks, s), expected);
    auto const summary = io::read_json(folder / (name + "/summary.json"));
    CHECK(summary["layout"]["runs_on"].get<std::string>().find("CUDA device 0") == 0);
  }
}

TEST_CASE("Layouts over NCCL ranks train the host's model") {
  test::temporary_folder folder;
  put_text(folder);
  auto s = small(folder, "host");
  s.layers = 2;
  auto const expected = train_on(1, s);
  s.device = "cuda";
  for (auto const& [ranks, layout] : {std::pair{2, "tensor 2, sequence parallel"},
                                      {2, "pipeline 2, zero bubble"},
                                      {2, "context 2"},
                                      {2, "data 2, zero 3, recompute unit"},
                                      {4, "data 2 x tensor 2, zero 2"},
                                      {4, "data 2 x pipeline 2, zero 3, 1f1b"}}) {
    if (training::ranks_here(ranks) < ranks) continue;
    CAPTURE(std::string(layout));
    s.layout = layout;
    s.run = folder / layout;
    check_same(train_on(ranks, s), expected);
  }
}

TEST_CASE("A run changes from the host to CUDA and back where that is meant, and only there") {
  test::temporary_folder folder;
  put_text(folder);
  auto s = small(folder, "run");
  auto const expected = train_on(1, s);
  auto const cut_to = [&](int step) { // as if the run had been killed before the later checkpoints
    for (int later = 6; later > step; later -= 2)
      io::remove_all(s.run + "/checkpoints/step-0000000" + std::to_string(later));
  };
  cut_to(2);
  s.device = "cuda";
  CHECK(test::error_of<config_error>([&] { train_on(1, s); }).says("device: host there, cuda here"));
  s.allow_difference = {"device"};
  check_same(train_on(1, s), expected);
  cut_to(4);
  s.device = "host";
  check_same(train_on(1, s), expected);
}

TEST_CASE("A checkpoint has the same bytes whichever space wrote it, and is read whole by the other") {
  test::temporary_folder folder;
  auto const config = training::gpt2();
  auto const save = [&](auto& mine, char const* name) {
    train::run_state state;
    state.step = mine.step;
    return train::save_checkpoint(mine.comm, mine.ex, folder / name, state, mine.model.store(),
                                  mine.replicas);
  };
  auto const load = [&](auto& mine, std::string const& path) {
    train::load_checkpoint(mine.comm, mine.ex, path, mine.model.store(), mine.replicas);
    mine.step = train::read_state(mine.comm, path).step;
  };
  using host_run = training::run<comm::threads, exec::host, float>;
  using cuda_run = training::run<comm::nccl, exec::cuda, float>;
  auto const on_host_rank = [&](auto f) {
    comm::run_threads(1, [&](comm::threads& alone) {
      exec::host ex({.threads = 1});
      host_run mine(alone, ex, config);
      f(mine);
    });
  };
  std::string written, copied, copied_back;
  training::outcome expected;
  on_host_rank([&](auto& mine) {
    mine.train(2);
    written = save(mine, "host");
    mine.train(training::steps);
    expected = mine.seen;
  });
  training::on_cuda_ranks(training::ranks_here(2), [&](comm::nccl& comm, exec::cuda& ex) {
    cuda_run mine(comm, ex, config);
    load(mine, written);
    auto const path = save(mine, "cuda");
    if (comm.rank() == 0) copied = path;
    mine.train(training::steps);
    CHECK(training::distance(mine.seen.weights, expected.weights) < 1e-5);
  });
  on_host_rank([&](auto& mine) {
    load(mine, copied);
    copied_back = save(mine, "back");
    mine.train(training::steps);
    CHECK(mine.seen.weights == expected.weights);
  });
  for (auto const* name : {"/model.safetensors", "/optimizer.safetensors"}) {
    auto const bytes = io::mapped_file(written + name);
    CHECK(io::mapped_file(copied + name).text() == bytes.text());
    CHECK(io::mapped_file(copied_back + name).text() == bytes.text());
  }
}

TEST_CASE("A decoder continues a prompt as the host's does") {
  auto const config = training::gpt2();
  std::vector<std::int32_t> const prompt{7, 3, 99, 0, 41};
  auto const continued = [&]<class Comm, class Ex>(Comm& comm, Ex& ex) {
    training::run<Comm, Ex, float> mine(comm, ex, config);
    nn::decoder<Ex, float, float> decoder(mine.model.units(), mine.model.store(), config, {.chunk = 3});
    return train::generate(ex, decoder, prompt, 20, {.temperature = 0}, philox(5), [](std::int32_t) {});
  };
  std::vector<std::int32_t> expected;
  comm::run_threads(1, [&](comm::threads& alone) {
    exec::host ex({.threads = 1});
    expected = continued(alone, ex);
  });
  training::on_cuda_ranks(1,
                          [&](comm::nccl& comm, exec::cuda& ex) { CHECK(continued(comm, ex) == expected); });
}
