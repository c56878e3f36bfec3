#include <tessera/ops/token_positions.hpp>

#include <map>
#include <type_traits>
#include <vector>

#include <doctest/doctest.h>

using namespace tessera;
using ops::token_positions;

static_assert(std::is_trivially_copyable_v<token_positions>);
static_assert(token_positions{}(7) == 7);
static_assert(token_positions{.first = 12, .split = 3, .second = 40}(5) == 42);

namespace {

constexpr auto limit = (std::numeric_limits<index_t>::max)();

/// All that the tests below take: few enough to try each.
std::vector<token_positions> all_of(index_t bound) {
  std::vector<token_positions> positions;
  for (index_t first = -1; first < bound; ++first) {
    positions.push_back({.first = first});
    for (index_t split = -1; split < bound; ++split)
      for (index_t second = -1; second < bound; ++second) positions.push_back({first, split, second});
  }
  return positions;
}

} // namespace

TEST_CASE("positions fit where every token has one of its own within the sequence") {
  for (index_t end : {0, 1, 5, 7})
    for (index_t count : {0, 1, 2, 4, 5, 8})
      for (auto const& positions : all_of(6)) {
        std::map<index_t, int> taken;
        auto expected = positions.first >= 0 && positions.split >= 0 && positions.second >= 0;
        for (index_t t = 0; t < count; ++t) {
          auto const p = t < positions.split ? positions.first + t : positions.second + t - positions.split;
          expected = expected && p >= 0 && p < end && taken[p]++ == 0;
        }
        CHECK(positions.fit(count, end) == expected);
      }
}

TEST_CASE("token_at finds the token of each position, and none elsewhere") {
  for (index_t count : {0, 1, 2, 4, 5})
    for (auto const& positions : all_of(6)) {
      if (!positions.fit(count, 12)) continue;
      std::map<index_t, index_t> token;
      index_t last = -1;
      for (index_t t = 0; t < count; ++t) token[positions(t)] = t, last = std::max(last, positions(t));
      for (index_t p = -2; p < 14; ++p)
        CHECK(positions.token_at(p, count) == (token.count(p) ? token[p] : -1));
      CHECK(positions.end(count) == last + 1);
    }
}

TEST_CASE("numbers near the end of the range do not wrap round") {
  CHECK(token_positions{.first = limit - 4}.fit(4, limit));
  CHECK(!token_positions{.first = limit - 3}.fit(4, limit));
  CHECK(!token_positions{.first = 0, .split = 1, .second = limit}.fit(2, limit));
  CHECK(!token_positions{.first = limit}.fit(limit, limit));
  CHECK(token_positions{.first = limit, .split = 0}.fit(5, 5));
  CHECK(token_positions{.first = limit - 4}.token_at(limit - 2, 4) == 2);
  CHECK(token_positions{.first = limit - 4}.token_at(3, 4) == -1);
}

TEST_CASE("messages name both stretches") {
  CHECK(token_positions{.first = 5}.text(7) == "5 + 7");
  CHECK(token_positions{.first = 5, .split = 4, .second = 40}.text(7) == "5 + 4 and 40 + 3");
}
