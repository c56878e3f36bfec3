#include <tessera/parallel/block_lender.hpp>

#include <doctest/doctest.h>
#include <tessera/exec/host.hpp>
#include <tessera/nn/make_transformer.hpp>

using namespace tessera;
using namespace tessera::parallel;

static_assert(block_lender<store_lender<exec::host, bf16, float>, exec::host, bf16, float>);
static_assert(!block_lender<store_lender<exec::host, bf16, float>, exec::host, float, float>);

TEST_CASE("a store lends each unit the block it holds, with the embedding's to a tied head") {
  exec::host ex;
  auto const units = nn::make_transformer<exec::host, float, float>(
      {.vocabulary_size = 7, .sequence_length = 4, .width = 8, .layers = 1, .heads = 2});
  nn::parameter_store<exec::host, float, float> store(units);
  store_lender<exec::host, float, float> lender(store);
  for (std::size_t u = 0; u < units.size(); ++u) {
    auto const lent = lender.lend(ex, u, {.next = no_unit, .gradients = false, .micro_batch = 3});
    CHECK(lent.weights.data() == store.weights(u).data());
    CHECK(lent.gradients.data() == store.gradients(u).data());
    CHECK((lent.tied_weights.data() == store.weights(0).data()) == (u + 1 == units.size()));
    CHECK((lent.tied_gradients.data() == store.gradients(0).data()) == (u + 1 == units.size()));
    lender.done(u);
    lender.gradients_ready(ex, u, true);
  }
  CHECK(!lender.accumulates(0));
  CHECK(lender.accumulates(1));
}
