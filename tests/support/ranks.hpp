/// Runs a test's body on several ranks: threads here; MPI tests have a main of their own.
#ifndef TESSERA_TESTS_SUPPORT_RANKS_HPP
#define TESSERA_TESTS_SUPPORT_RANKS_HPP

#include <doctest/doctest.h>

#include <tessera/comm/threads.hpp>

namespace test {

/// body(rank) on 1, 2, ... up to `most` thread ranks. A rank that waits for 20 s fails the test, not the run.
template <class Body>
void on_thread_ranks(int most, Body body, tessera::comm::communicator_options options = {.stall_limit = 20}) {
  for (int ranks = 1; ranks <= most; ++ranks) {
    CAPTURE(ranks);
    tessera::comm::run_threads(ranks, body, options);
  }
}

} // namespace test

#endif
