#include <tessera/ops/embedding.hpp>

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

TEST_CASE_TEMPLATE("embedding adds the token's row and the position's", T, float, bf16, fp16) {
  exec::host ex({.threads = 2});
  for (auto const& s : cases) {
    auto const tokens = tokens_of(s.batch, s.length, static_cast<std::int32_t>(s.classes));
    auto const table = reference::normal<T, 2>({s.classes, s.width}, 1);
    auto const positions = reference::normal<T, 2>({s.positions, s.width}, 2);
    for (index_t first : {index_t{0}, s.positions - s.length}) {
      tensor<T, 2> out({s.batch * s.length, s.width}), expected({s.batch * s.length, s.width}),
          plain({s.batch * s.length, s.width});
      for (index_t b = 0; b < s.batch; ++b)
        for (index_t t = 0; t < s.length; ++t)
          for (index_t i = 0; i < s.width; ++i) {
            plain(b * s.length + t, i) = table(tokens(b, t), i);
            expected(b * s.length + t, i) =
                T(static_cast<float>(table(tokens(b, t), i)) + static_cast<float>(positions(first + t, i)));
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
  tokens(1, 2) = 0;
  for (index_t first : {index_t{1}, index_t{-1}, INT64_MAX})
    CHECK(test::error_of<size_error>([&] {
            ops::embedding(ex, out.view(), tokens, table, positions, {.positions = {.first = first}});
          }).id == "E-ops-010");
  tensor<float, 2> narrow_positions({3, 3});
  CHECK(test::error_of<size_error>([&] {
          ops::embedding(ex, out.view(), tokens, table, narrow_positions);
        }).id == "E-ops-001");
}
