#include <doctest/doctest.h>

#include <tessera/exec/host.hpp>
#include <tessera/nn/unit.hpp>

using namespace tessera;

TEST_CASE("losses add up as sum and count, and a count of zero is legal") {
  nn::loss_sum total;
  total += {6, 3};
  total += {0, 0};
  total += {2, 1};
  CHECK(total.sum == 8);
  CHECK(total.count == 4);
}

TEST_CASE("a stream's shape is that of its tokens") {
  std::int32_t const tokens[6] = {};
  nn::stream<exec::host, float> const s{.tokens = {tokens, {2, 3}}};
  CHECK(s.shape() == nn::batch_shape{2, 3});
  CHECK(s.shape().tokens() == 6);
  CHECK(s.logits.empty());
}
