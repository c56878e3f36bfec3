#include <tessera/parallel/loss.hpp>

#include "fixture.hpp"

using namespace tessera;
using namespace fixture;

TEST_CASE("The mean over ranks weighs each token, not each rank") {
  for (int ranks : {1, 2, 3, 4}) {
    std::vector<nn::loss_sum> totals(static_cast<std::size_t>(ranks));
    on_ranks(ranks, [&](auto& comm) {
      auto const r = comm.rank();
      // Rank 1 predicts nothing; rank 0 has many tokens of loss 1, the others one of loss 7.
      auto const local = r == 0 ? nn::loss_sum{97, 97} : r == 1 ? nn::loss_sum{} : nn::loss_sum{7, 1};
      totals[static_cast<std::size_t>(r)] = parallel::sum_over_ranks(comm, local);
    });
    auto const others = ranks > 2 ? ranks - 2 : 0;
    for (auto total : totals) {
      CHECK(total.count == 97 + others);
      CHECK(parallel::mean_of(total) == (97 + 7.0 * others) / (97 + others));
    }
  }
}

TEST_CASE("A count of zero is legal") {
  CHECK(parallel::mean_of({0, 0}) == 0);
}
