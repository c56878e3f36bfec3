#include <doctest/doctest.h>

#include <support/thrown.hpp>
#include <tessera/nn/tensor_part.hpp>

using namespace tessera;

TEST_CASE("parts of a dimension are in order and cover it, uneven and empty ones included") {
  for (index_t n : {0, 1, 3, 7, 19})
    for (int ranks : {1, 2, 4, 8}) {
      index_t end = 0;
      for (int r = 0; r < ranks; ++r) {
        auto const part = nn::tensor_part{.ranks = ranks, .rank = r}.of(n);
        CHECK(part.begin == end);
        end = part.end;
      }
      CHECK(end == n);
    }
}

TEST_CASE("one rank's share is no share, so that its parameters are as they always were") {
  nn::tensor_part const alone;
  CHECK(alone.cut(0, 7).dimension == -1);
  CHECK(alone.cut(1, {{2, 3}}).copies == 1);
  CHECK(alone.copy().copies == 1);
  CHECK(alone.copy_on_rows().copies == 1);
  CHECK(!alone.copy_on_rows().partial);
}

TEST_CASE("what is cut has one holder; copies say whether their gradients are summands") {
  nn::tensor_part const part{.ranks = 4, .rank = 1, .shares_rows = true};
  auto const cut = part.cut(1, 10);
  CHECK(cut.dimension == 1);
  CHECK(cut.pieces == std::vector<layout::range>{{3, 6}});
  CHECK(cut.copies == 1);
  CHECK(!cut.partial);
  auto const shared = part.cut(0, {{2, 4}}, 2);
  CHECK(shared.copies == 2);
  CHECK(shared.partial);
  CHECK(part.copy().copies == 4);
  CHECK(!part.copy().partial);
  CHECK(part.copy_on_rows().partial);
  CHECK(!nn::tensor_part{.ranks = 4}.copy_on_rows().partial);
}

TEST_CASE("query heads read key heads that are on their rank, however few there are") {
  for (index_t heads : {4, 8, 16})
    for (index_t key_heads = 1; key_heads <= heads; key_heads *= 2)
      for (int ranks : {1, 2, 4}) {
        for (int r = 0; r < ranks; ++r) {
          auto const here = nn::head_part::of({.ranks = ranks, .rank = r}, heads, key_heads);
          CHECK(here.queries.size() == heads / ranks);
          CHECK(here.queries.begin == r * here.queries.size());
          auto const group = heads / key_heads;
          CHECK(here.queries.begin / group == here.keys.begin);
          CHECK((here.queries.end - 1) / group == here.keys.end - 1);
          CHECK(here.copies == (key_heads < ranks ? ranks / key_heads : 1));
          // Attention pairs local head q with local key head q / (queries / keys): the same pairs.
          auto const local = here.queries.size() / here.keys.size();
          for (index_t q = 0; q < here.queries.size(); ++q)
            CHECK(here.keys.begin + q / local == (here.queries.begin + q) / group);
        }
      }
}

TEST_CASE("heads that do not divide are refused with a number that would do") {
  auto const of = [](int ranks, index_t heads, index_t keys) {
    return test::error_of<config_error>([=] { (void)nn::head_part::of({.ranks = ranks}, heads, keys); });
  };
  CHECK(of(4, 6, 6).id == "E-nn-024");
  CHECK(of(4, 6, 6).says("8 would be"));
  CHECK(of(2, 6, 3).id == "E-nn-024");
  CHECK(of(2, 6, 3).says("3 key/value heads"));
  CHECK(of(4, 8, 2).id == "nothing was thrown");
}
