#include <doctest/doctest.h>

#include <support/thrown.hpp>
#include <tessera/parallel/training_layout.hpp>

using namespace tessera;
using parallel::training_layout;

namespace {

using kind = layout::schedule_kind;

nn::transformer_config llama() {
  auto config = nn::tiny_llama(); // 4 layers, 4 heads, 2 heads of keys and values, 64 tokens
  config.layers = 6;
  return config;
}

struct refusal {
  training_layout layout;
  parallel::layout_demands on;
  char const* id;
  char const* says;   ///< What is wrong.
  char const* remedy; ///< What to do.
};

} // namespace

TEST_CASE("a layout that cannot be is refused with what is wrong and what to change") {
  auto const contiguous = layout::sequence_assignment::contiguous;
  auto const exchange = parallel::context_form::exchange;
  auto const interleaved = kind::interleaved_one_forward_one_backward;
  refusal const table[] = {
      {{.data = -1}, {8, 1}, "E-parallel-070", "data is -1", "set it to 0 or more"},
      {{.tensor = 0}, {8, 1}, "E-parallel-070", "tensor is 0", "set it to 1 or more"},
      {{.pipeline = 0}, {8, 1}, "E-parallel-070", "pipeline is 0", "set it to 1 or more"},
      {{.context = -2}, {8, 1}, "E-parallel-070", "context is -2", "set it to 1 or more"},
      {{.zero = 4}, {8, 1}, "E-parallel-070", "zero is 4", "0 to 3"},
      {{.zero = -1}, {8, 1}, "E-parallel-070", "zero is -1", "set it to 0 or more"},
      {{.shard_group = -1}, {8, 1}, "E-parallel-070", "shard_group is -1", "0 or more"},
      {{.chunks = 0}, {8, 1}, "E-parallel-070", "chunks is 0", "1 or more"},
      {{.tensor = 1 << 29, .pipeline = 1 << 29, .context = 64},
       {8, 1},
       "E-parallel-070",
       "tensor is",
       "or less"},
      {{.tensor = 1 << 15, .pipeline = 1 << 15, .context = 1 << 15},
       {8, 1},
       "E-parallel-071",
       "do not divide",
       ""},
      {{.pipeline = 8, .schedule = interleaved, .chunks = 999999999},
       {8, 1},
       "E-parallel-070",
       "chunks is",
       ""},
      {{.micro_batch = -1}, {8, 1}, "E-parallel-070", "micro_batch is -1", "0 or more"},
      {{.tensor = 2, .pipeline = 2}, {8, 6}, "E-parallel-071", "do not divide the 6", "start 8"},
      {{.data = 3, .tensor = 2}, {8, 4}, "E-parallel-071", "takes 6 ranks, and there are 4", "data at 0"},
      {{.sequence_parallel = true}, {8, 1}, "E-parallel-072", "tensor is 1", "set tensor to 2"},
      {{.form = exchange}, {8, 1}, "E-parallel-072", "context_form is exchange", "leave it at ring"},
      {{.assignment = contiguous}, {8, 1}, "E-parallel-072", "contiguous", "leave it at zigzag"},
      {{.schedule = kind::gpipe}, {8, 1}, "E-parallel-072", "pipeline is 1", "set pipeline to 2"},
      {{.pipeline = 2, .schedule = interleaved}, {8, 2}, "E-parallel-072", "1 chunk", "set chunks to 2"},
      {{.pipeline = 2, .chunks = 2}, {8, 2}, "E-parallel-072", "chunks is 2", "schedule to interleaved"},
      {{.zero = 0, .shard_group = 2}, {8, 4}, "E-parallel-072", "stage 0 shares nothing", "set zero to 1"},
      {{.shard_group = 3}, {8, 4}, "E-parallel-072", "does not divide", "divisor of 4"},
      {{.tensor = 3}, {8, 3}, "E-parallel-073", "does not divide heads 4", "heads to 6"},
      {{.pipeline = 8}, {8, 8}, "E-parallel-073", "6 layers cannot be shared", "set layers to 8 or more"},
      {{.pipeline = 2, .schedule = interleaved, .chunks = 4},
       {8, 2},
       "E-parallel-073",
       "pipeline 2 x chunks 4 = 8 parts",
       "lower pipeline or chunks"},
      {{.context = 33}, {8, 33}, "E-parallel-073", "66 pieces", "lengthen it or lower context"},
      {{.context = 65, .assignment = contiguous}, {8, 65}, "E-parallel-073", "65 pieces", "lower context"},
      {{.tensor = 2, .context = 4, .form = exchange},
       {8, 8},
       "E-parallel-073",
       "the 2 heads that a tensor rank has",
       "heads to a multiple of 8"},
      {{.tensor = 2, .reproducible = true}, {8, 2}, "E-parallel-074", "with tensor 2", "set both to 1"},
      {{.micro_batch = 2, .reproducible = true}, {10, 2}, "E-parallel-074", "batch 10", "12 would be"},
      {{.pipeline = 2,
        .schedule = layout::schedule_kind::zero_bubble,
        .micro_batch = 1,
        .reproducible = true},
       {4, 2},
       "E-parallel-074",
       "zero bubble",
       "set schedule to one_forward_one_backward"},
      {{.micro_batch = 2, .reproducible = true},
       {12, 2},
       "E-parallel-074",
       "3 micro-batches",
       "power of two"},
  };
  for (auto const& row : table) {
    CAPTURE(row.says);
    auto const caught = test::error_of<config_error>([&] { (void)row.layout.resolved(llama(), row.on); });
    CAPTURE(caught.message);
    CHECK(caught.id == row.id);
    CHECK(caught.says(row.says));
    CHECK(caught.says(row.remedy));
  }
}

TEST_CASE("key and value heads divide the tensor and context ranks, or these them") {
  auto config = llama();
  config.heads = 12;
  config.key_value_heads = 6;
  auto const refused = [&](training_layout const& l, int ranks) {
    return test::error_of<config_error>([&] { (void)l.resolved(config, {8, ranks}); });
  };
  CHECK(refused({.tensor = 4}, 4).says("key_value_heads 6: one must divide the other"));
  CHECK(
      refused({.context = 4, .form = parallel::context_form::exchange}, 4).says("set context_form to ring"));
  CHECK(refused({.tensor = 6}, 6).id == "nothing was thrown");
  CHECK(refused({.tensor = 12}, 12).id == "nothing was thrown");
  CHECK(refused({.context = 4}, 4).id == "nothing was thrown");
}

TEST_CASE("reproducible sums with a pipeline need a head of its own") {
  auto config = llama();
  training_layout const l{.pipeline = 2, .micro_batch = 1, .reproducible = true};
  CHECK_NOTHROW((void)l.resolved(config, {4, 2}));
  config.tied_head = true;
  auto const caught = test::error_of<config_error>([&] { (void)l.resolved(config, {4, 2}); });
  CHECK(caught.id == "E-parallel-074");
  CHECK(caught.says("set tied_head to false"));
}

TEST_CASE("what is left open is filled in, and nothing else is changed") {
  training_layout const half{.tensor = 2, .pipeline = 2, .zero = 3};
  auto const whole = half.resolved(llama(), {.batch = 10, .ranks = 8});
  auto expected = half;
  expected.data = 2;
  expected.micro_batch = 5;
  CHECK(whole == expected);
  CHECK(whole.ranks() == 8);
  CHECK(whole.gradient_ranks() == 2);
  CHECK(whole.mesh() == layout::mesh_shape{.pipeline = 2, .data = 2, .tensor = 2});
  CHECK(whole.resolved(llama(), {.batch = 10, .ranks = 8}) == whole);
}

TEST_CASE("every data rank has the same number of micro-batches, which cover the batch once") {
  for (int data : {1, 2, 3, 5})
    for (index_t batch : {0, 1, 4, 7, 30})
      for (index_t micro : {1, 2, 3, 100}) {
        CAPTURE(data);
        CAPTURE(batch);
        CAPTURE(micro);
        training_layout const l{.data = data, .micro_batch = micro};
        index_t next = 0;
        for (int d = 0; d < data; ++d)
          for (index_t n = 0; n < l.micro_batches(batch); ++n) {
            auto const part = l.micro_batch_of(batch, d, n);
            CHECK(part.begin == next);
            CHECK(part.size() >= 0);
            CHECK(part.size() <= micro);
            next = part.end;
          }
        CHECK(next == batch);
        CHECK(l.micro_batches(batch) >= 1);
      }
}
