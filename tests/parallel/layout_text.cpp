#include <doctest/doctest.h>

#include <support/thrown.hpp>
#include <tessera/parallel/layout_text.hpp>

using namespace tessera;
using parallel::parse_layout;
using parallel::training_layout;

TEST_CASE("a layout's text is read back to the same value") {
  using kind = layout::schedule_kind;
  struct row {
    training_layout layout;
    char const* text;
  } const table[] = {
      {{}, "data rest, zero 1"},
      {{.data = 1, .zero = 0}, "data 1, zero 0"},
      {{.data = 2, .tensor = 2, .pipeline = 2, .zero = 3}, "data 2 x tensor 2 x pipeline 2, zero 3, 1f1b"},
      {{.data = 4, .zero = 2, .shard_group = 2}, "data 4, zero 2, shard group 2"},
      {{.tensor = 4, .sequence_parallel = true, .micro_batch = 8},
       "data rest x tensor 4, zero 1, sequence parallel, micro-batch 8"},
      {{.context = 2, .form = parallel::context_form::exchange}, "data rest x context 2, zero 1, exchange"},
      {{.data = 1, .context = 2, .assignment = layout::sequence_assignment::contiguous},
       "data 1 x context 2, zero 1, contiguous"},
      {{.pipeline = 4, .schedule = kind::gpipe}, "data rest x pipeline 4, zero 1, gpipe"},
      {{.pipeline = 4, .schedule = kind::zero_bubble}, "data rest x pipeline 4, zero 1, zero bubble"},
      {{.pipeline = 2,
        .schedule = kind::interleaved_one_forward_one_backward,
        .chunks = 3,
        .recompute = parallel::recomputation::unit},
       "data rest x pipeline 2, zero 1, interleaved 3, recompute unit"},
      {{.data = 8, .recompute = parallel::recomputation::attention, .reproducible = true},
       "data 8, zero 1, recompute attention, reproducible"},
  };
  for (auto const& row : table) {
    CHECK(text_of(row.layout) == row.text);
    CHECK(parse_layout(row.text) == row.layout);
  }
}

TEST_CASE("order and blanks are free, and defaults may be said or left out") {
  training_layout const expected{.data = 2, .tensor = 2, .zero = 3, .sequence_parallel = true};
  CHECK(parse_layout("tensor 2  x data 2,sequence parallel ,  zero 3") == expected);
  CHECK(parse_layout(
            "tensor 2 x data 2 x context 1, zero 3, sequence parallel, ring, zigzag, recompute none") ==
        expected);
  CHECK(parse_layout("tensor 2") == training_layout{.tensor = 2});
}

TEST_CASE("text that is no layout is quoted, with what could stand there") {
  struct row {
    char const* text;
    char const* quoted;
    char const* instead;
  } const table[] = {{"", "''", "data N"},
                     {"data", "'data'", "data N"},
                     {"data two", "'data two'", "joined by ' x '"},
                     {"data 2 tensor 2", "'data 2 tensor 2'", "joined by ' x '"},
                     {"data -2", "'data -2'", "data N"},
                     {"data 2 x", "'data 2 x'", "data N"},
                     {"data 99999999999999999999", "'data 99999999999999999999'", "data N"},
                     {"zero 3", "'zero 3'", "begins with data N"},
                     {"data 2, zero", "'zero'", "zero N"},
                     {"data 2, interleaved", "'interleaved'", "interleaved N"},
                     {"data 2, zer0 3", "'zer0 3'", "zero N"},
                     {"data 2, , zero 3", "''", "zero N"},
                     {"data 2, tensor 2", "'tensor 2'", "behind the axes"}};
  for (auto const& row : table) {
    CAPTURE(row.text);
    auto const caught = test::error_of<config_error>([&] { (void)parse_layout(row.text); });
    CHECK(caught.id == "E-parallel-075");
    CHECK(caught.says(row.quoted));
    CHECK(caught.says(row.instead));
  }
}
