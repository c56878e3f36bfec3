#include <doctest/doctest.h>

#include <atomic>
#include <map>

#include <support/ranks.hpp>
#include <support/temporary_folder.hpp>
#include <support/thrown.hpp>

#include <tessera/exec/host.hpp>
#include <tessera/train/trainer.hpp>

using namespace tessera;

namespace {

using trainer_type = train::trainer<comm::threads, exec::host, float>;

train::settings small(test::temporary_folder const& folder, std::string const& run) {
  train::settings s;
  s.data = folder / "text.txt";
  s.run = folder / run;
  s.steps = 8;
  s.warm_up_steps = 2;
  s.width = 16;
  s.heads = 2;
  s.layers = 1;
  s.sequence_length = 12;
  s.batch = 5;
  s.micro_batch = 2;
  s.dropout = 0.2;
  s.checkpoint_every = 0;
  s.validate_every = 3;
  s.validation_samples = 7;
  s.measure_peak = false;
  return s;
}

void put_text(test::temporary_folder const& folder) {
  std::string text;
  for (int i = 0; i < 300; ++i) text += "line " + std::to_string(i * i) + "\n";
  test::put(folder / "text.txt", text);
}

struct outcome {
  std::map<std::string, std::vector<float>> weights;
  std::vector<train::metrics_row> rows;
  double validation = 0;
};

outcome train_on(int ranks, train::settings const& s) {
  outcome result;
  comm::run_threads(ranks, [&](comm::threads& all) {
    exec::host ex({.threads = 1});
    trainer_type trainer(all, ex, s);
    trainer.run();
    if (all.rank() != 0) return;
    std::map<std::string, std::vector<float>> weights;
    io::safetensors_file const file(trainer.checkpoint() + "/model.safetensors");
    for (auto const& entry : file.entries()) {
      weights[entry.name].resize(static_cast<std::size_t>(entry.elements()));
      file.read(entry.name, std::span(weights[entry.name]));
    }
    result = {std::move(weights), train::read_metrics(trainer.metrics_path()),
              parallel::mean_of(trainer.validation())};
  });
  return result;
}

double largest_difference(outcome const& a, outcome const& b) {
  auto largest = a.weights.size() == b.weights.size() ? 0.0 : 1e9;
  for (auto const& [name, values] : a.weights) {
    auto const& others = b.weights.at(name);
    REQUIRE(values.size() == others.size());
    for (std::size_t i = 0; i < values.size(); ++i)
      largest = std::max(largest, std::abs(static_cast<double>(values[i] - others[i])));
  }
  return largest;
}

} // namespace

TEST_CASE("any number of ranks, micro-batch and ZeRO stage trains the same model, dropout included") {
  test::temporary_folder folder;
  put_text(folder);
  auto const whole = [&] {
    auto s = small(folder, "one");
    s.micro_batch = 5;
    return train_on(1, s);
  }();
  REQUIRE(whole.rows.size() == 8);
  CHECK(whole.rows.front().loss == doctest::Approx(std::log(256.0)).epsilon(0.05));
  CHECK(whole.rows.back().loss < whole.rows.front().loss);
  int number = 0;
  for (int ranks : {1, 2, 3, 4})
    for (index_t stage : {0, 1}) {
      CAPTURE(ranks);
      CAPTURE(stage);
      auto s = small(folder, "run" + std::to_string(number++));
      s.zero_stage = stage;
      auto const shared = train_on(ranks, s);
      REQUIRE(shared.rows.size() == 8);
      for (std::size_t i = 0; i < 8; ++i) {
        CHECK(shared.rows[i].loss == doctest::Approx(whole.rows[i].loss).epsilon(1e-5));
        CHECK(shared.rows[i].gradient_norm == doctest::Approx(whole.rows[i].gradient_norm).epsilon(1e-4));
      }
      CHECK(shared.validation == doctest::Approx(whole.validation).epsilon(1e-5));
      CHECK(largest_difference(shared, whole) < 2e-4);
    }
}

TEST_CASE(
    "a run cut into pieces has the bits of one that never stopped, and on other ranks if that is allowed") {
  test::temporary_folder folder;
  put_text(folder);
  auto s = small(folder, "whole");
  s.checkpoint_every = 3;
  auto const whole = train_on(2, s);
  // The pieces end where the latest checkpoint is removed, as if the run had been killed before it.
  s.run = folder / "pieces";
  (void)train_on(2, s);
  io::remove_all(s.run + "/checkpoints/step-00000008");
  io::remove_all(s.run + "/checkpoints/step-00000006");
  auto const pieces = train_on(2, s);
  CHECK(pieces.weights == whole.weights);
  CHECK(pieces.validation == whole.validation);
  REQUIRE(pieces.rows.size() == 8);
  for (std::size_t i = 0; i < 8; ++i) CHECK(pieces.rows[i].loss == whole.rows[i].loss);

  io::remove_all(s.run + "/checkpoints/step-00000008");
  CHECK(test::error_of<config_error>([&] {
          train_on(3, s);
        }).says("layout: data 2, zero 1, micro-batch 2 there, data 3, zero 1, micro-batch 2 here"));
  s.allow_difference = {"layout"};
  auto const others = train_on(3, s);
  for (std::size_t i = 0; i < 8; ++i)
    CHECK(others.rows[i].loss == doctest::Approx(whole.rows[i].loss).epsilon(1e-5));
}

TEST_CASE(
    "after an allowed change of the batch a run goes on where its samples ended, however often it stops") {
  test::temporary_folder folder;
  put_text(folder);
  auto s = small(folder, "run");
  s.allow_difference = {"steps", "batch"};
  index_t samples = 0;
  s.steps = 0;
  for (index_t batch : {4, 8, 8, 6}) {
    CAPTURE(samples);
    s.steps += 3;
    s.batch = batch;
    samples += 3 * batch;
    auto const done = train_on(2, s);
    auto const state = io::read_json(io::commits_in(s.run + "/checkpoints").back().path + "/state.json");
    CHECK(state.at("position") == samples);
    REQUIRE(done.rows.size() == static_cast<std::size_t>(s.steps));
    CHECK(done.rows.back().tokens == static_cast<double>(samples * s.sequence_length));
  }
}

TEST_CASE(
    "a run without steps leaves its starting weights, and ranks that share a step spend time in messages") {
  test::temporary_folder folder;
  put_text(folder);
  auto s = small(folder, "run");
  s.steps = s.warm_up_steps = 0;
  CHECK(train_on(1, s).weights.size() > 4);
  s = small(folder, "two");
  for (auto const& row : train_on(2, s).rows) {
    CHECK(row.communication_share > 0);
    CHECK(row.communication_share < 1);
  }
}

TEST_CASE("a run goes on under another layout from where the first one stopped") {
  test::temporary_folder folder;
  put_text(folder);
  auto s = small(folder, "one");
  s.family = "llama";
  s.heads = 4;
  s.layers = 4;
  s.dropout = 0;
  s.batch = 6;
  s.micro_batch = 1;
  s.checkpoint_every = 4;
  s.keep = 5;
  auto const whole = train_on(1, s);

  auto moving = s;
  moving.run = folder / "moving";
  moving.layout = "data 2 x tensor 2, zero 2, micro-batch 1";
  (void)train_on(4, moving);
  for (auto const& [ranks, layout] : {std::pair{4, "pipeline 4, zero 1, zero bubble"},
                                      {8, "data 2 x pipeline 2 x context 2, zero 3, interleaved 2"},
                                      {4, "tensor 4, sequence parallel, recompute unit"},
                                      {1, "data 1"}}) {
    CAPTURE(std::string(layout));
    io::remove_all(moving.run + "/checkpoints/step-00000008");
    moving.layout = layout;
    moving.allow_difference = {};
    CHECK(test::error_of<config_error>([&] { train_on(ranks, moving); }).says("--allow-difference layout"));
    moving.allow_difference = {"layout"};
    auto const there = train_on(ranks, moving);
    REQUIRE(there.rows.size() == 8);
    for (std::size_t i = 0; i < 8; ++i)
      CHECK(there.rows[i].loss == doctest::Approx(whole.rows[i].loss).epsilon(1e-5));
    CHECK(there.validation == doctest::Approx(whole.validation).epsilon(1e-5));
  }
}

TEST_CASE("a step allocates nothing once the first is done") {
  test::temporary_folder folder;
  put_text(folder);
  auto s = small(folder, "run");
  index_t after_two[2];
  for (index_t more : {0, 1}) {
    s.steps = 2 + more * 5;
    s.run = folder / ("run" + std::to_string(more));
    comm::run_threads(1, [&](comm::threads& all) {
      exec::host ex({.threads = 1});
      trainer_type trainer(all, ex, s);
      trainer.run();
      after_two[more] = trainer.memory().allocations();
    });
  }
  CHECK(after_two[0] == after_two[1]);
}

TEST_CASE("a step whose loss is not finite ends all ranks, names the step, and keeps the good checkpoint") {
  test::temporary_folder folder;
  put_text(folder);
  auto s = small(folder, "run");
  s.checkpoint_every = 1;
  s.learning_rate = 9e15;
  s.clip = 0;
  s.steps = 40;
  std::atomic<int> stopped = 0;
  comm::run_threads(2, [&](comm::threads& all) {
    exec::host ex({.threads = 1});
    auto const caught = test::error_of<numeric_error>([&] {
      trainer_type trainer(all, ex, s);
      trainer.run();
    });
    if (caught.id == "E-train-070" && caught.says("step ") && caught.says("checkpoints/step-")) ++stopped;
    CHECK_FALSE(train::latest_checkpoint(all, s.run + "/checkpoints").empty());
  });
  CHECK(stopped == 2);
}

TEST_CASE("ranks with different settings all end with an error") {
  test::temporary_folder folder;
  put_text(folder);
  std::atomic<int> ended = 0;
  comm::run_threads(3, [&](comm::threads& all) {
    auto s = small(folder, "run");
    if (all.rank() == 2) s.batch = 7;
    exec::host ex({.threads = 1});
    try {
      trainer_type trainer(all, ex, s);
    } catch (error const& e) {
      if (std::string(e.what()).find("rank 2: batch 7; rank 0: batch 5") != std::string::npos) ++ended;
    }
  });
  CHECK(ended == 3);
}
