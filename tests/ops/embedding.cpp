#include <tessera/ops/embedding.hpp>

#include <vector>

#include "fixture.hpp"

using namespace fixture;

namespace {

tensor<std::int32_t, 2> tokens_of(index_t batch, index_t length, std::int32_t bound) {
  tensor<std::int32_t, 2> tokens({batch, length});
  auto const drawn = reference::integers(batch * length, bound, 9);
  for (index_t i = 0; i < drawn.size(); ++i) tokens.data()[i] = drawn(i);
  return tokens;
}

struct sizes {
  index_t batch, length, classes, width, positions;
};
constexpr sizes cases[] = {{0, 3, 5, 4, 3},  {2, 0, 5, 4, 3},    {1, 1, 1, 1, 1},
                           {3, 7, 11, 5, 9}, {2, 13, 3, 97, 13}, {4, 5, 1009, 33, 8}};

} // namespace

TEST_CASE_TEMPLATE("embedding adds the token's row and the position's", P, types<float, float>,
                   types<bf16, bf16>, types<fp16, fp16>, types<bf16, bf16, float>, types<fp16, fp16, float>,
                   types<float, float, bf16>) {
  using T = typename P::T; // of the tables
  using Out = typename P::R;
  exec::host ex({.threads = 2});
  for (auto const& s : cases) {
    auto const tokens = tokens_of(s.batch, s.length, static_cast<std::int32_t>(s.classes));
    auto const table = reference::normal<T, 2>({s.classes, s.width}, 1);
    auto const positions = reference::normal<T, 2>({s.positions, s.width}, 2);
    for (index_t first : {index_t{0}, s.positions - s.length}) {
      tensor<Out, 2> out({s.batch * s.length, s.width}), expected({s.batch * s.length, s.width}),
          plain({s.batch * s.length, s.width});
      for (index_t b = 0; b < s.batch; ++b)
        for (index_t t = 0; t < s.length; ++t)
          for (index_t i = 0; i < s.width; ++i) {
            plain(b * s.length + t, i) = Out(table(tokens(b, t), i));
            expected(b * s.length + t, i) =
                Out(static_cast<float>(table(tokens(b, t), i)) + static_cast<float>(positions(first + t, i)));
          }
      ops::embedding(ex, out.view(), tokens, table, positions, {.positions = {.first = first}});
      CHECK(bits(out) == bits(expected));
      ops::embedding(ex, out.view(), tokens, table, {});
      CHECK(bits(out) == bits(plain));
    }
  }
}

TEST_CASE_TEMPLATE("embedding_backward sums each token's and each position's rows", P, types<float, float>,
                   types<bf16, bf16>, types<bf16, float>) {
  using T = typename P::T;
  using G = typename P::G;
  exec::host ex({.threads = 2});
  for (auto const& s : cases)
    for (auto accumulate : {false, true}) {
      auto const tokens = tokens_of(s.batch, s.length, static_cast<std::int32_t>(s.classes));
      auto const d_out = reference::normal<T, 2>({s.batch * s.length, s.width}, 3);
      auto d_table = reference::normal<G, 2>({s.classes, s.width}, 4);
      auto d_positions = reference::normal<G, 2>({s.positions, s.width}, 5);
      auto const first = s.positions - s.length;
      auto table = reference::doubles(d_table.span()), positions = reference::doubles(d_positions.span());
      if (!accumulate) {
        for (auto& v : table) v = 0;
        for (auto& v : positions) v = 0;
      }
      for (index_t b = 0; b < s.batch; ++b)
        for (index_t t = 0; t < s.length; ++t)
          for (index_t i = 0; i < s.width; ++i) {
            auto const d = static_cast<double>(static_cast<float>(d_out(b * s.length + t, i)));
            table[static_cast<std::size_t>(tokens(b, t) * s.width + i)] += d;
            positions[static_cast<std::size_t>((first + t) * s.width + i)] += d;
          }
      ops::embedding_backward(ex, d_table.view(), d_positions.view(), d_out.view(), tokens,
                              {.accumulate_table = accumulate,
                               .accumulate_positions = accumulate,
                               .positions = {.first = first}});
      CHECK(reference::max_relative_error(d_table, table) < reference::tolerance<G>());
      CHECK(reference::max_relative_error(d_positions, positions) < reference::tolerance<G>());
    }
}

namespace {

/// The vocabulary cut unevenly: an empty slice at each end, and one inside.
std::vector<index_t> cuts_of(index_t classes) {
  return {0, 0, classes / 3, classes / 2, classes / 2, classes, classes};
}

} // namespace

TEST_CASE_TEMPLATE("slices of a table embed their own tokens, and zeros elsewhere", P, types<float, float>,
                   types<bf16, bf16>, types<bf16, bf16, float>) {
  using T = typename P::T;
  using Out = typename P::R;
  exec::host ex({.threads = 2});
  for (auto const& s : cases) {
    auto const tokens = tokens_of(s.batch, s.length, static_cast<std::int32_t>(s.classes));
    auto const table = reference::normal<T, 2>({s.classes, s.width}, 1);
    auto const positions = reference::normal<T, 2>({s.positions, s.width}, 2);
    auto const cuts = cuts_of(s.classes);
    for (std::size_t rank = 0; rank + 1 < cuts.size(); ++rank) {
      auto const slice = table.view().slice(0, cuts[rank], cuts[rank + 1]);
      ops::embedding_options const options{.first_token = cuts[rank], .vocabulary = s.classes};
      tensor<Out, 2> out({s.batch * s.length, s.width}), placed(out.extents()), expected(out.extents()),
          expected_placed(out.extents());
      for (index_t row = 0; row < out.extent(0); ++row)
        for (index_t i = 0; i < s.width; ++i) {
          auto const token = tokens.data()[row];
          auto const x = token >= cuts[rank] && token < cuts[rank + 1] ? table(token, i) : T(0.0f);
          expected(row, i) = Out(x);
          expected_placed(row, i) =
              Out(static_cast<float>(x) + static_cast<float>(positions(row % s.length, i)));
        }
      ops::embedding(ex, out.view(), tokens, slice, {}, options);
      ops::embedding(ex, placed.view(), tokens, slice, positions, options);
      CHECK(bits(out) == bits(expected));
      CHECK(bits(placed) == bits(expected_placed));
    }
  }
}

TEST_CASE_TEMPLATE("the gradient of a slice is the slice of the gradient", G, float, bf16) {
  exec::host ex({.threads = 2});
  for (auto const& s : cases)
    for (auto accumulate : {false, true}) {
      auto const tokens = tokens_of(s.batch, s.length, static_cast<std::int32_t>(s.classes));
      auto const d_out = reference::normal<bf16, 2>({s.batch * s.length, s.width}, 3);
      auto whole = reference::normal<G, 2>({s.classes, s.width}, 4),
           parts = reference::normal<G, 2>({s.classes, s.width}, 4);
      ops::embedding_backward(ex, whole.view(), {}, d_out.view(), tokens, {.accumulate_table = accumulate});
      auto const cuts = cuts_of(s.classes);
      for (std::size_t rank = 0; rank + 1 < cuts.size(); ++rank)
        ops::embedding_backward(
            ex, parts.view().slice(0, cuts[rank], cuts[rank + 1]), {}, d_out.view(), tokens,
            {.accumulate_table = accumulate, .first_token = cuts[rank], .vocabulary = s.classes});
      CHECK(bits(parts) == bits(whole));
    }
}

TEST_CASE("tokens that stand in two stretches take their positions' rows, and give them their gradients") {
  exec::host ex({.threads = 2});
  index_t const batch = 2, length = 5, width = 7;
  auto const tokens = tokens_of(batch, length, 4);
  auto const table = reference::normal<float, 2>({4, width}, 1);
  auto const rows = reference::normal<float, 2>({12, width}, 2);
  auto const d_out = reference::normal<float, 2>({batch * length, width}, 3);
  for (auto const& positions :
       {ops::token_positions{.first = 1, .split = 2, .second = 9}, {.first = 9, .split = 2, .second = 0}}) {
    tensor<float, 2> out({batch * length, width}), d_table({4, width}), d_rows({12, width});
    ops::embedding(ex, out.view(), tokens, table, rows, {.positions = positions});
    ops::embedding_backward(ex, d_table.view(), d_rows.view(), d_out.view(), tokens,
                            {.positions = positions});
    numbers expected(static_cast<std::size_t>(d_rows.size()));
    for (index_t row = 0; row < batch * length; ++row)
      for (index_t i = 0; i < width; ++i) {
        auto const p = positions(row % length);
        CHECK(out(row, i) == table(tokens.data()[row], i) + rows(p, i));
        expected[static_cast<std::size_t>(p * width + i)] += static_cast<double>(d_out(row, i));
      }
    CHECK(reference::max_relative_error(d_rows, expected) < 1e-6);
  }
}

TEST_CASE("many small gradients of one token are not lost in a 16-bit sum") {
  exec::host ex({.threads = 1});
  index_t const rows = 4096;
  tensor<std::int32_t, 2> tokens({1, rows});
  tensor<bf16, 2> d_out({rows, 1}), d_table({2, 1});
  for (auto& v : d_out.span()) v = bf16(1.0f);
  ops::embedding_backward(ex, d_table.view(), {}, d_out.view(), tokens);
  CHECK(static_cast<float>(d_table(0, 0)) == 4096); // a running bf16 sum would stop at 256
  CHECK(static_cast<float>(d_table(1, 0)) == 0);
}

TEST_CASE_TEMPLATE("embedding_backward gives the same bits for any number of threads", G, float, bf16) {
  auto const tokens = tokens_of(7, 61, 50);
  auto const d_out = reference::normal<bf16, 2>({7 * 61, 211}, 3);
  same_bits_for_any_thread_count([&](exec::host& ex) {
    tensor<G, 2> d_table({50, 211}), d_positions({61, 211});
    ops::embedding_backward(ex, d_table.view(), d_positions.view(), d_out.view(), tokens);
    tensor<bf16, 2> out({7 * 61, 211});
    ops::embedding(ex, out.view(), tokens, reference::normal<bf16, 2>({50, 211}, 1), {});
    return bits(d_table) + bits(d_positions) + bits(out);
  });
}

TEST_CASE("a token or a position that does not exist is named") {
  exec::host ex({.threads = 1});
  tensor<std::int32_t, 2> tokens({2, 3});
  tensor<float, 2> out({6, 4}), table({5, 4}), positions({3, 4});
  for (auto bad : {-1, 5, -100, INT32_MAX}) {
    tokens(1, 2) = bad;
    auto const caught =
        test::error_of<size_error>([&] { ops::embedding(ex, out.view(), tokens, table, {}); });
    CHECK(caught.id == "E-ops-011");
    CHECK(caught.says("(1, 2) is " + std::to_string(bad)));
    CHECK(test::error_of<size_error>([&] {
            ops::embedding_backward(ex, table.view(), {}, out.view(), tokens);
          }).id == "E-ops-011");
  }
  // A slice knows the tokens of the others, and no more.
  for (auto bad : {-1, 20}) {
    tokens(1, 2) = bad;
    CHECK(test::error_of<size_error>([&] {
            ops::embedding(ex, out.view(), tokens, table, {}, {.first_token = 5, .vocabulary = 20});
          }).says("[0, 20)"));
  }
  tokens(1, 2) = 0;
  for (ops::embedding_options const& slice : {ops::embedding_options{.first_token = -1, .vocabulary = 20},
                                              {.first_token = 1},
                                              {.first_token = 16, .vocabulary = 20},
                                              {.vocabulary = 4}}) {
    CHECK(test::error_of<size_error>([&] { ops::embedding(ex, out.view(), tokens, table, {}, slice); }).id ==
          "E-ops-014");
    CHECK(test::error_of<size_error>([&] {
            ops::embedding_backward(ex, table.view(), {}, out.view(), tokens,
                                    {.first_token = slice.first_token, .vocabulary = slice.vocabulary});
          }).id == "E-ops-014");
  }
  for (index_t first : {index_t{1}, index_t{-1}, INT64_MAX})
    CHECK(test::error_of<size_error>([&] {
            ops::embedding(ex, out.view(), tokens, table, positions, {.positions = {.first = first}});
          }).id == "E-ops-010");
  tensor<float, 2> narrow_positions({3, 3});
  CHECK(test::error_of<size_error>([&] {
          ops::embedding(ex, out.view(), tokens, table, narrow_positions);
        }).id == "E-ops-001");
}
