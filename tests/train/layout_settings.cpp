#include <doctest/doctest.h>

#include <support/thrown.hpp>

#include <tessera/train/layout_settings.hpp>

using namespace tessera;

TEST_CASE("the settings of a layout, one by one or in one line, are the same layout") {
  train::settings one_by_one;
  train::settings line;
  for (auto const& [name, value] : {std::pair{"data_ranks", "2"},
                                    {"tensor", "2"},
                                    {"pipeline", "2"},
                                    {"context", "2"},
                                    {"zero_stage", "3"},
                                    {"shard_group", "2"},
                                    {"sequence_parallel", "true"},
                                    {"context_form", "exchange"},
                                    {"context_shards", "contiguous"},
                                    {"pipeline_schedule", "interleaved"},
                                    {"chunks", "3"},
                                    {"micro_batch", "4"},
                                    {"recompute", "attention"},
                                    {"reproducible", "true"}})
    train::set(one_by_one, name, value);
  line.layout =
      "data 2 x tensor 2 x pipeline 2 x context 2, zero 3, shard group 2, sequence parallel, exchange, "
      "contiguous, interleaved 3, micro-batch 4, recompute attention, reproducible";
  CHECK(train::layout_of(one_by_one) == train::layout_of(line));

  using kind = layout::schedule_kind;
  for (auto const& [text, value] : {std::pair{"gpipe", kind::gpipe},
                                    {"1f1b", kind::one_forward_one_backward},
                                    {"interleaved", kind::interleaved_one_forward_one_backward},
                                    {"zero_bubble", kind::zero_bubble}}) {
    train::settings s;
    train::set(s, "pipeline_schedule", text);
    CHECK(train::layout_of(s).schedule == value);
  }
  train::settings s;
  s.recompute = "unit";
  CHECK(train::layout_of(s).recompute == nn::recomputation::unit);
}

TEST_CASE("a line leaves the micro-batch to its own setting, and says the rest alone") {
  train::settings s;
  CHECK(train::layout_of(s).micro_batch == s.micro_batch);
  s.layout = "tensor 2";
  CHECK(train::layout_of(s) == parallel::training_layout{.tensor = 2, .micro_batch = s.micro_batch});
  s.layout = "tensor 2, micro-batch 3";
  CHECK(train::layout_of(s).micro_batch == 3);
  s.micro_batch = 3;
  CHECK(train::layout_of(s).micro_batch == 3);

  auto const refused = [&] { return test::error_of<config_error>([&] { (void)train::layout_of(s); }); };
  s.micro_batch = 2;
  CHECK(refused().id == "E-train-007");
  CHECK(refused().says("micro_batch is 2"));
  s.micro_batch = 3;
  for (auto const& f : train::fields) {
    if (f.group != "Layout" || f.bound == train::binding::refused) continue;
    auto const name = std::string(f.name);
    if (name == "ranks" || name == "threads" || name == "layout" || name == "bucket_mib") continue;
    CAPTURE(name);
    auto const before = s;
    std::visit(
        [&](auto member) {
          auto& value = s.*member;
          if constexpr (std::same_as<decltype(value), std::string&>)
            value = "x";
          else if constexpr (std::same_as<decltype(value), bool&>)
            value = !value;
          else
            value += 1;
        },
        f.member);
    CHECK(refused().id == "E-train-007");
    CHECK(refused().says(name));
    s = before;
  }
  s.layout = "tensors 2";
  CHECK(refused().id == "E-parallel-075");
}

TEST_CASE("the size of buckets is refused where there are none") {
  train::settings s;
  s.bucket_mib = 8;
  CHECK(test::error_of<config_error>([&] { (void)train::layout_of(s); }).says("choose zero_stage 0"));
  s.zero_stage = 0;
  CHECK(train::layout_of(s).zero == 0);
  s.zero_stage = 1;
  s.layout = "data 2, zero 0";
  CHECK(train::layout_of(s).zero == 0);
}

TEST_CASE("what changes no bit is no difference between two runs") {
  parallel::training_layout const l{.data = 2, .pipeline = 2, .zero = 1, .micro_batch = 4};
  auto other = l;
  other.schedule = layout::schedule_kind::interleaved_one_forward_one_backward;
  other.chunks = 2;
  other.recompute = nn::recomputation::unit;
  CHECK(train::rounding_of(other) == train::rounding_of(l));
  other.tensor = 2;
  CHECK(train::rounding_of(other) != train::rounding_of(l));
  CHECK(train::rounding_of({.data = 4, .reproducible = true}) ==
        train::rounding_of({.data = 1, .pipeline = 2, .zero = 3, .reproducible = true}));
  CHECK(train::rounding_of({.data = 4, .micro_batch = 2, .reproducible = true}) !=
        train::rounding_of({.data = 4, .micro_batch = 1, .reproducible = true}));
  CHECK(train::rounding_of({.data = 4, .reproducible = true}) != train::rounding_of({.data = 4}));
}
