#include <tessera/ops/random_normal.hpp>

#include "fixture.hpp"

using namespace fixture;

TEST_CASE_TEMPLATE("each number is the stream's at its index, scaled, shifted and rounded", T, float, bf16,
                   fp16) {
  exec::host ex({.threads = 2});
  for (auto n : {0, 1, 7, 1021}) {
    tensor<T, 1> out({n});
    ops::random_normal(ex, out.view(),
                       {.mean = 0.5f, .deviation = 0.02f, .seed = 3, .stream = 9, .first = 5});
    philox const random(3, 9);
    bool right = true;
    for (index_t i = 0; i < n; ++i)
      right =
          right && static_cast<float>(out(i)) ==
                       static_cast<float>(T(0.5f + 0.02f * random.normal(static_cast<std::uint64_t>(5 + i))));
    CHECK(right);
  }
}

TEST_CASE("pieces drawn one by one are the whole") {
  exec::host ex({.threads = 1});
  tensor<float, 1> whole({1009}), pieces({1009});
  ops::random_normal(ex, whole.view(), {.seed = 1, .stream = 2});
  for (index_t begin = 0; begin < 1009; begin += 100) {
    auto const end = std::min<index_t>(begin + 100, 1009);
    ops::random_normal(ex, pieces.view().slice(0, begin, end), {.seed = 1, .stream = 2, .first = begin});
  }
  CHECK(bits(pieces) == bits(whole));
}

TEST_CASE("without a deviation every element is the mean") {
  exec::host ex({.threads = 1});
  tensor<float, 1> out({37});
  ops::random_normal(ex, out.view(), {.mean = 1.25f, .deviation = 0});
  for (auto v : out.span()) CHECK(v == 1.25f);
}

TEST_CASE("random_normal gives the same bits for any number of threads") {
  same_bits_for_any_thread_count([](exec::host& ex) {
    tensor<bf16, 1> out({10007});
    ops::random_normal(ex, out.view(), {.seed = 4});
    return bits(out);
  });
}

TEST_CASE("random_normal refuses a view with gaps") {
  exec::host ex({.threads = 1});
  tensor<float, 2> matrix({4, 2});
  auto const column = view<float, 1>(matrix.data(), {4}, {2});
  CHECK(test::error_of<size_error>([&] { ops::random_normal(ex, column, {}); }).id == "E-ops-003");
}
