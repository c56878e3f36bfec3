#include <tessera/parallel/ring_attention.hpp>

#include <support/thrown.hpp>

#include "context_fixture.hpp"

using namespace context_fixture;

namespace {

constexpr sequence_assignment assignments[] = {sequence_assignment::contiguous, sequence_assignment::zigzag};

template <class T>
void compare_ring(sizes s, int ranks, bool causal = true) {
  for (auto assignment : assignments)
    compare<T>(s, context_form::ring, ranks, {.assignment = assignment, .causal = causal});
}

} // namespace

TEST_CASE_TEMPLATE("ring attention and its gradients are those of one rank and of the definition", T, float,
                   bf16) {
  for (int ranks = 1; ranks <= 4; ++ranks) {
    compare_ring<T>({1, 24, 2, 2, 8}, ranks);
    compare_ring<T>({3, 37, 4, 2, 5}, ranks); // odd, several samples, grouped heads
  }
  compare_ring<T>({2, 29, 4, 1, 16}, 3);
}

TEST_CASE("every query may see all keys") {
  for (int ranks = 2; ranks <= 4; ++ranks) compare_ring<float>({2, 23, 2, 1, 6}, ranks, false);
}
