#include <tessera/parallel/context_options.hpp>

#include <doctest/doctest.h>

using namespace tessera;

TEST_CASE("options say how the sequence lies, whatever the number of ranks") {
  constexpr parallel::context_options options{.sequence_length = 100};
  static_assert(options.causal && options.scale == 0);
  static_assert(options.shards(4).length == 100 && options.shards(4).ranks == 4);
  static_assert(options.shards(4).assignment == layout::sequence_assignment::zigzag);
  constexpr parallel::context_options in_order{.sequence_length = 100,
                                               .assignment = layout::sequence_assignment::contiguous};
  CHECK(in_order.shards(4).positions(1) == layout::sequence_positions{{25, 50}, {50, 50}});
}

TEST_CASE("a length that nobody has said is none") {
  CHECK(parallel::context_options{}.sequence_length < 0);
}
