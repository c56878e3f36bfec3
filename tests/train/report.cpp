#include <doctest/doctest.h>

#include <support/temporary_folder.hpp>

#include <tessera/comm/self.hpp>
#include <tessera/exec/host.hpp>
#include <tessera/train/report.hpp>

using namespace tessera;

TEST_CASE("figures are weighed by time, and the first step's speed does not count") {
  std::vector<train::metrics_row> rows;
  for (int i = 1; i <= 40; ++i)
    rows.push_back({.step = 1.0 * i,
                    .tokens = 100.0 * i,
                    .loss = i > 38 ? 2.0 : 5.0,
                    .tokens_per_second = i == 1       ? 1.0
                                         : i % 2 == 0 ? 100.0
                                                      : 50.0,
                    .peak_share = i == 1 ? 0.9 : 0.5,
                    .communication_share = 0.1});
  auto const f = train::detail::figures_of(rows);
  CHECK(f.training_loss == doctest::Approx(2.0)); // the last twentieth
  CHECK(f.seconds == doctest::Approx(100 + 20 * 1.0 + 19 * 2.0));
  CHECK(f.tokens_per_second == doctest::Approx(3900 / 58.0));
  CHECK(f.peak_share == doctest::Approx(0.5));
  CHECK(f.communication_share == doctest::Approx(0.1));
  CHECK(train::detail::figures_of({}).tokens_per_second == 0);
}

TEST_CASE("losses are per byte where there is text, else per token") {
  CHECK(train::detail::per_unit(6, 3) == 2);
  CHECK(train::detail::per_unit(6, 0) == 6);
}

TEST_CASE("a finished run leaves its summary, its picture and a sample") {
  test::temporary_folder folder;
  std::string text;
  for (int i = 0; i < 200; ++i) text += "line " + std::to_string(i * i) + "\n";
  test::put(folder / "text.txt", text);
  train::settings s;
  s.data = folder / "text.txt";
  s.run = folder / "run";
  s.steps = 3;
  s.warm_up_steps = 1;
  s.width = 16;
  s.heads = 2;
  s.layers = 1;
  s.sequence_length = 12;
  s.batch = 2;
  s.sample_tokens = 30;
  s.prompt = "line";
  comm::self alone;
  exec::host ex({.threads = 1});
  train::trainer<comm::self, exec::host, bf16> trainer(alone, ex, s);
  trainer.run();
  auto const account = folder / "account";
  auto* const out = std::fopen(account.c_str(), "w");
  train::report(trainer, out, "self");
  std::fclose(out);

  auto const summary = io::read_json(s.run + "/summary.json");
  for (auto const* key :
       {"training_loss", "validation_loss", "unigram_entropy", "bigram_entropy", "tokens_per_second",
        "matrix_peak_share", "peak_bytes", "zero_formula_bytes", "layout", "seed"})
    CHECK(summary.contains(key));
  CHECK(summary["seed"] == 1337);
  CHECK(summary["layout"]["ranks"] == 1);
  CHECK(summary["validation_loss"].get<double>() ==
        doctest::Approx(parallel::mean_of(trainer.validation())).epsilon(1e-9)); // a byte a token
  index_t elements = 0;
  for (auto const& map : trainer.whole().units) elements += map.block_size();
  CHECK(summary["peak_bytes"]["parameters"].get<index_t>() == 2 * elements);
  CHECK(test::contents_of(s.run + "/loss.svg").substr(0, 4) == "<svg");
  auto const sample = test::contents_of(s.run + "/sample.txt");
  CHECK(sample.substr(0, 4) == "line");
  CHECK(sample.size() == 4 + 30 + 1);
  auto const printed = test::contents_of(account);
  for (auto const* word :
       {"validation loss", "bigram entropy", "unigram entropy", "ZeRO formula", "summary.json"})
    CHECK(printed.find(word) != std::string::npos);
}
