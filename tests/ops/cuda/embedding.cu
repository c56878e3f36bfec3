#include <tessera/ops/cuda/embedding.cuh>

#include "ops/cuda/fixture.hpp"
#include "support/cuda.hpp"
#if defined(TESSERA_CUDA_EMULATION)
#include <cuda_emulation/control.hpp>
#endif

using namespace cuda_fixture;
using test::on_device;
using test::placement;

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
constexpr sizes cases[] = {{0, 3, 5, 4, 3},  {2, 0, 5, 4, 3},     {1, 1, 1, 1, 1},
                           {3, 7, 11, 5, 9}, {2, 13, 3, 257, 13}, {4, 5, 509, 32, 8}};
constexpr placement placements[] = {{}, {.offset = 1, .gap = 3}, {.gap = 8}};

template <class T>
test::device_view<T, 2> none() {
  return {};
}

} // namespace

TEST_CASE_TEMPLATE("embedding on CUDA gives the host's bits", P, types<float, float>, types<bf16, bf16>,
                   types<fp16, fp16>, types<bf16, bf16, float>, types<fp16, fp16, float>,
                   types<float, float, bf16>) {
  using T = typename P::T; // of the tables
  using Out = typename P::R;
  exec::cuda ex;
  exec::host host({.threads = 1});
  for (auto const& s : cases)
    for (auto const& where : placements) {
      auto const tokens = tokens_of(s.batch, s.length, static_cast<std::int32_t>(s.classes));
      auto const table = reference::normal<T, 2>({s.classes, s.width}, 1);
      auto const positions = reference::normal<T, 2>({s.positions, s.width}, 2);
      on_device<std::int32_t, 2> device_tokens(ex, tokens, where);
      on_device<T, 2> device_table(ex, table, where), device_positions(ex, positions, where);
      for (index_t first : {index_t{0}, s.positions - s.length}) {
        tensor<Out, 2> expected({s.batch * s.length, s.width}), plain({s.batch * s.length, s.width});
        ops::embedding(host, expected.view(), tokens, table, positions, {.positions = {.first = first}});
        ops::embedding(host, plain.view(), tokens, table, {});
        on_device<Out, 2> out(ex, expected.extents(), where);
        ops::embedding(ex, out.view(), device_tokens, device_table.view(), device_positions,
                       {.positions = {.first = first}});
        CHECK(bits(out.read(ex)) == bits(expected));
        ops::embedding(ex, out.view(), device_tokens, device_table.view(), none<T const>());
        CHECK(bits(out.read(ex)) == bits(plain));
      }
    }
}

TEST_CASE_TEMPLATE("embedding_backward on CUDA gives the host's bits and float64's sums", P,
                   types<float, float>, types<bf16, bf16>, types<bf16, float>, types<fp16, float>) {
  using T = typename P::T;
  using G = typename P::G;
  exec::cuda ex;
  exec::host host({.threads = 1});
  for (auto const& s : cases)
    for (auto const& where : placements)
      for (auto accumulate : {false, true}) {
        auto const tokens = tokens_of(s.batch, s.length, static_cast<std::int32_t>(s.classes));
        auto const d_out = reference::normal<T, 2>({s.batch * s.length, s.width}, 3);
        auto d_table = reference::normal<G, 2>({s.classes, s.width}, 4);
        auto d_positions = reference::normal<G, 2>({s.positions, s.width}, 5);
        auto exact = reference::doubles(d_table.span());
        if (!accumulate)
          for (auto& v : exact) v = 0;
        for (index_t row = 0; row < s.batch * s.length; ++row)
          for (index_t i = 0; i < s.width; ++i)
            exact[static_cast<std::size_t>(tokens.data()[row] * s.width + i)] +=
                static_cast<double>(static_cast<float>(d_out(row, i)));
        on_device<std::int32_t, 2> device_tokens(ex, tokens, where);
        on_device<T, 2> device_d_out(ex, d_out, where);
        on_device<G, 2> device_table(ex, d_table, where), device_positions(ex, d_positions, where);
        ops::embedding_backward_options const options{.accumulate_table = accumulate,
                                                      .accumulate_positions = accumulate,
                                                      .positions = {.first = s.positions - s.length}};
        ops::embedding_backward(ex, device_table.view(), device_positions.view(), device_d_out.view(),
                                device_tokens, options);
        ops::embedding_backward(host, d_table.view(), d_positions.view(), d_out.view(), tokens, options);
        auto const got = device_table.read(ex);
        CHECK(bits(got) == bits(d_table));
        CHECK(bits(device_positions.read(ex)) == bits(d_positions));
        CHECK(reference::max_relative_error(got, exact) < reference::tolerance<G>());
      }
}

TEST_CASE_TEMPLATE("slices of a table, and two stretches of positions, give the host's bits on CUDA", T,
                   float, bf16) {
  exec::cuda ex;
  exec::host host({.threads = 1});
  for (auto const& where : placements)
    for (auto const& [first, end] : {std::pair<index_t, index_t>{0, 0}, {0, 4}, {4, 11}, {11, 11}}) {
      CAPTURE(first);
      ops::token_positions const positions{.first = 1, .split = 3, .second = 8};
      auto const tokens = tokens_of(3, 7, 11);
      auto const table = reference::normal<T, 2>({end - first, 29}, 1),
                 rows = reference::normal<T, 2>({12, 29}, 2), d_out = reference::normal<T, 2>({21, 29}, 3);
      on_device<std::int32_t, 2> device_tokens(ex, tokens, where);
      on_device<T, 2> device_table(ex, table, where), device_rows(ex, rows, where),
          device_d_out(ex, d_out, where), out(ex, d_out.extents(), where);
      on_device<float, 2> device_d_table(ex, {end - first, 29}, where), device_d_rows(ex, {12, 29}, where);
      tensor<T, 2> expected(d_out.extents());
      tensor<float, 2> d_table({end - first, 29}), d_rows({12, 29});
      ops::embedding_options const options{.positions = positions, .first_token = first, .vocabulary = 11};
      ops::embedding_backward_options const back{
          .positions = positions, .first_token = first, .vocabulary = 11};
      ops::embedding(host, expected.view(), tokens, table, rows, options);
      ops::embedding_backward(host, d_table.view(), d_rows.view(), d_out.view(), tokens, back);
      ops::embedding(ex, out.view(), device_tokens, device_table.view(), device_rows, options);
      ops::embedding_backward(ex, device_d_table.view(), device_d_rows.view(), device_d_out.view(),
                              device_tokens, back);
      ex.synchronize(); // no token was outside the vocabulary
      CHECK(bits(out.read(ex)) == bits(expected));
      CHECK(bits(device_d_table.read(ex)) == bits(d_table));
      CHECK(bits(device_d_rows.read(ex)) == bits(d_rows));
    }
}

TEST_CASE("rows of the table whose token does not occur are zeroed, or left alone") {
  exec::cuda ex;
  tensor<std::int32_t, 2> tokens({1, 3});
  for (auto& t : tokens.span()) t = 4;
  on_device<std::int32_t, 2> device_tokens(ex, tokens);
  on_device<float, 2> d_out(ex, reference::normal<float, 2>({3, 8}, 1));
  auto const before = reference::normal<bf16, 2>({7, 8}, 2);
  for (bool accumulate : {false, true}) {
    on_device<bf16, 2> d_table(ex, before);
    ops::embedding_backward(ex, d_table.view(), none<bf16>(), d_out.view(), device_tokens,
                            {.accumulate_table = accumulate});
    auto const after = d_table.read(ex);
    for (index_t v = 0; v < 7; ++v)
      if (v != 4)
        for (index_t i = 0; i < 8; ++i) CHECK(after(v, i).bits == (accumulate ? before(v, i).bits : 0));
  }
}

TEST_CASE("the same sizes again take no memory") {
  exec::cuda ex;
  on_device<std::int32_t, 2> tokens(ex, tokens_of(2, 9, 7));
  on_device<float, 2> d_out(ex, reference::normal<float, 2>({18, 8}, 1)), d_table(ex, {7, 8});
  auto const run = [&] { ops::embedding_backward(ex, d_table.view(), none<float>(), d_out.view(), tokens); };
  run();
  auto const allocations = ex.scratch().allocations();
  run();
  ex.synchronize();
  CHECK(ex.scratch().allocations() == allocations);
}

TEST_CASE("a token outside the table is named by the next call that waits, and embeds to NaN until then") {
  exec::cuda ex;
  for (auto bad : {-1, 6, INT32_MAX, INT32_MIN}) {
    tensor<std::int32_t, 2> tokens({2, 3});
    tokens(1, 1) = bad;
    tokens(1, 2) = bad;
    on_device<std::int32_t, 2> device_tokens(ex, tokens);
    on_device<float, 2> table(ex, reference::normal<float, 2>({6, 4}, 1)), out(ex, {6, 4}),
        d_table(ex, {6, 4});
    ops::embedding(ex, out.view(), device_tokens, table.view(), none<float const>());
    auto caught = test::error_of<size_error>([&] { ex.synchronize(); });
    CHECK(caught.id == "E-ops-011");
    CHECK(caught.says("embedding: the token at (1, 1) is " + std::to_string(bad)));
    CHECK(caught.says("[0, 6)"));
    auto const rows = out.read(ex); // said once
    CHECK(std::isnan(rows(4, 0)));
    CHECK(!std::isnan(rows(3, 0)));

    ops::embedding_backward(ex, d_table.view(), none<float>(), out.view().slice(0, 0, 6), device_tokens);
    caught = test::error_of<size_error>([&] { ex.synchronize(); });
    CHECK(caught.id == "E-ops-011");
    CHECK(caught.says("embedding_backward: the token at (1, 1) is " + std::to_string(bad)));
    auto const sums = d_table.read(ex);
    for (auto value : sums.span()) CHECK(!std::isnan(value)); // the bad rows belong to no token
  }
}

TEST_CASE("NaN in a gradient reaches its token's row alone") {
  exec::cuda ex;
  auto const tokens = tokens_of(2, 5, 4);
  auto d_out = reference::normal<float, 2>({10, 8}, 1);
  d_out(3, 2) = NAN;
  on_device<std::int32_t, 2> device_tokens(ex, tokens);
  on_device<float, 2> device_d_out(ex, d_out), d_table(ex, {4, 8});
  ops::embedding_backward(ex, d_table.view(), none<float>(), device_d_out.view(), device_tokens);
  auto const sums = d_table.read(ex);
  for (index_t v = 0; v < 4; ++v)
    for (index_t i = 0; i < 8; ++i) CHECK(std::isnan(sums(v, i)) == (v == tokens.data()[3] && i == 2));
}

#if defined(TESSERA_CUDA_EMULATION)
TEST_CASE("sums of the embedding's gradient do not depend on the order of blocks") {
  exec::cuda ex;
  on_device<std::int32_t, 2> tokens(ex, tokens_of(3, 40, 5));
  on_device<bf16, 2> d_out(ex, reference::normal<bf16, 2>({120, 24}, 1));
  std::string before;
  for (bool backwards : {false, true}) {
    cuda_emulation::run_blocks_backwards(backwards);
    on_device<float, 2> d_table(ex, {5, 24}), d_positions(ex, {40, 24});
    ops::embedding_backward(ex, d_table.view(), d_positions.view(), d_out.view(), tokens);
    auto const all = bits(d_table.read(ex)) + bits(d_positions.read(ex));
    if (backwards) CHECK(all == before);
    before = all;
  }
  cuda_emulation::run_blocks_backwards(false);
}
#endif
