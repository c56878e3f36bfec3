#include <tessera/parallel/sequence_exchange.hpp>

#include <support/thrown.hpp>

#include "context_fixture.hpp"

using namespace context_fixture;

namespace {

constexpr sequence_assignment assignments[] = {sequence_assignment::contiguous, sequence_assignment::zigzag};

template <class T>
void compare_exchange(sizes s, int ranks, bool causal = true) {
  for (auto assignment : assignments)
    compare<T>(s, context_form::exchange, ranks, {.assignment = assignment, .causal = causal});
}

} // namespace

TEST_CASE_TEMPLATE("exchanged attention and its gradients are those of one rank and of the definition", T,
                   float, bf16) {
  for (int ranks : {1, 2, 4}) {
    compare_exchange<T>({1, 24, 4, 4, 8}, ranks);
    compare_exchange<T>({3, 37, 4, 2, 5}, ranks);
  }
  compare_exchange<T>({2, 19, 6, 3, 7}, 3);
}

TEST_CASE("key heads that ranks share are there on each of them, and their gradients are added up") {
  compare_exchange<float>({2, 21, 4, 1, 6}, 2);
  compare_exchange<float>({2, 21, 4, 1, 6}, 4);
  compare_exchange<float>({1, 21, 8, 2, 3}, 4);
  compare_exchange<float>({2, 17, 6, 2, 4}, 3); // a rank's heads lie in two groups
  compare_exchange<float>({2, 17, 6, 3, 4}, 2); // in groups cut unevenly
}
